"""The records' one definition: every field with its type, range, unit, scope and meaning.

Declared in rows.py and environment.py; validation, outputs/README.md and outputs/schema.json are
made of these declarations. `python -m docs.generate.dictionary` writes the latter two.
"""
