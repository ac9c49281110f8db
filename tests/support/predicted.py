"""A model of a step with round numbers, and a far link."""

from __future__ import annotations

from harness.core.collectives import GLOO, Wire
from harness.read.predict.computing import fit_line
from harness.read.predict.model import Model

MB = 1e6
# 10 ms + 1 ms a sample, without noise.
LINE = fit_line([(8, 0.018), (16, 0.026), (32, 0.042), (16, 0.026)])
MODEL = Model(LINE, 0.1, 0.0, 0.002, int(4 * MB), GLOO)
FAR = Wire(0.020, 25e6)
