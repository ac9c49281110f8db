"""The single definition of records: every field with type, range, unit, scope and meaning.

Fields are declared in rows.py, environment.py and telemetry.py. Validation, outputs/README.md and
outputs/schema.json are made from them; `python -m docs.generate.dictionary` writes the latter two.
"""
