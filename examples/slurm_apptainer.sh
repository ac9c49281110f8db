# Not tried: no cluster with Apptainer was at hand. The SLURM launcher itself is tested on SLURM 22.05.
#
#   apptainer build harness.sif docker-daemon://harness:latest       (examples/Dockerfile)
#   python -m harness sweep experiments/topology.yaml --launcher slurm --partition gpu --timeout 4h \
#     --requeue 5 --setup_script examples/slurm_apptainer.sh
#
# Each job sources this file: `python` is then the one in the image. SIF names the image. The
# checkout and outputs must be on storage that all nodes share.
SIF=${SIF:-$PWD/harness.sif}
# On the shared storage: srun looks there on every node.
mkdir -p outputs
bin=$(mktemp -d "$PWD/outputs/.bin-XXXXXX")
cat >"$bin/python" <<END
#!/bin/sh
exec apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$SIF" /harness/.venv/bin/python "\$@"
END
chmod +x "$bin/python"
trap 'rm -rf "$bin"' EXIT
export PATH="$bin:$PATH"
# Nodes often have no way to the Hub: run the script once on the login node, with a small --train_size
# and --test_size. HF_HOME must be on the shared storage, and the image must see it (--bind).
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
