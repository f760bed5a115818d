"""What the exercises ask for, in the order of the lessons."""

from ..exercise import Exercise
from . import backward, decoding, forward, hunts, masks, tensor_cores

EXERCISES: list[Exercise] = sorted(
    [*forward.EXERCISES, *backward.EXERCISES, *tensor_cores.EXERCISES, *hunts.EXERCISES,
     *masks.EXERCISES, *decoding.EXERCISES],
    key=lambda e: e.number)
