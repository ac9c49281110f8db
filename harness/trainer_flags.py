"""The flags of transformers' TrainingArguments: which exist, and which are not passed through.

They are read from the source text of the installed transformers, so that a typo is answered
before torch is loaded, and on machines that have no torch.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

# Flags of TrainingArguments that are not passed through: what to do instead, and why.
REFUSED = {
    "average_tokens_across_devices": "the mean over samples is always used (docs/traps.md)",
    "accelerator_config": "it changes how batches are split; use --tail and --per_gpu_batch",
    "auto_find_batch_size": "the batch is what is measured; name it with --per_gpu_batch",
    "batch_eval_metrics": "evaluation is always batch-wise",
    "bf16": "use --precision bf16",
    "bf16_full_eval": "it leaves the weights in bfloat16 for good; use --precision bf16",
    "dataloader_drop_last": "it drops test samples too; --tail cut drops training samples only",
    "ddp_broadcast_buffers": "buffers are averaged before evaluation; see --batchnorm",
    "ddp_find_unused_parameters": "it is always off; these models use all their parameters",
    "deepspeed": "not a strategy of this harness; see --strategy",
    "do_eval": "evaluation runs after every epoch",
    "do_predict": "evaluation runs after every epoch",
    "do_train": "training always runs",
    "enable_jit_checkpoint": "runs stop and resume by themselves; see --save",
    "eval_strategy": "evaluation runs after every epoch",
    "eval_steps": "evaluation runs after every epoch",
    "eval_delay": "evaluation runs after every epoch",
    "eval_on_start": "evaluation runs after every epoch",
    "eval_use_gather_object": "it fails on the metrics of several ranks",
    "fp16": "use --precision fp16",
    "fp16_full_eval": "it leaves the weights in float16 for good; use --precision fp16",
    "fsdp": "use --strategy fsdp",
    "fsdp_config": "use --strategy fsdp with --fsdp_shard, --fsdp_offload, --precision",
    "greater_is_better": "it follows from --best_metric",
    "hub_token": "a token on the command line ends up in records; set HF_TOKEN instead",
    "ignore_data_skip": "a resumed run goes on with the samples it has not seen",
    "include_num_input_tokens_seen": "it synchronises every step",
    "label_names": "the label is named by --label_column",
    "load_best_model_at_end": "use --save best",
    "local_rank": "torchrun sets it",
    "logging_nan_inf_filter": "it hides a diverged run; NaN always ends a run here",
    "parallelism_config": "use --strategy",
    "prediction_loss_only": "the metrics are what is measured",
    "remove_unused_columns": "only the columns that the model reads are loaded",
    "restore_callback_states_from_checkpoint": "the records on disk are the state",
    "resume_from_checkpoint": "the same command resumes by itself; --rerun starts afresh",
    "save_only_model": "a run could not be resumed; use --save none",
    "save_strategy": "use --save none, last or best",
    "save_total_limit": "use --save last or best",
    "tf32": "use --precision tf32",
    "train_sampling_strategy": "it gives ranks different orders; samples are shuffled by --seed",
}


@functools.cache
def trainer_flags() -> dict[str, tuple[str, str]]:
    """Name -> (default, first sentence of its help) of the installed TrainingArguments.

    From the source text: importing it would load torch. Empty where transformers is missing,
    as on a login node that only launches.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0], "training_args.py").read_text("utf-8")
    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found[item.target.id] = _default_and_help(item.value)
    return found


def _default_and_help(value: ast.expr | None) -> tuple[str, str]:
    parts = {k.arg: k.value for k in value.keywords} if isinstance(value, ast.Call) else {}
    default = parts.get("default")
    text = ""
    metadata = parts.get("metadata")
    if isinstance(metadata, ast.Dict) and metadata.values:
        try:
            text = str(ast.literal_eval(metadata.values[0]))
        except ValueError:
            text = ""
    shown = ast.unparse(default) if isinstance(default, ast.Constant) else ""
    return shown, " ".join(text.split()).split(". ")[0].rstrip(".")
