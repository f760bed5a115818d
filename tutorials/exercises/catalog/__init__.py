"""What the exercises ask for, in the order of the lessons."""

from ..exercise import Exercise
from . import (
    backward,
    copy_engine,
    decoding,
    forward,
    hopper_backward,
    hopper_backward_hunts,
    hunts,
    masks,
    tensor_cores,
    warpgroup_hunts,
    warpgroups,
)

EXERCISES: list[Exercise] = sorted(
    [*forward.EXERCISES, *backward.EXERCISES, *tensor_cores.EXERCISES, *hunts.EXERCISES,
     *masks.EXERCISES, *decoding.EXERCISES, *copy_engine.EXERCISES,
     *warpgroups.EXERCISES, *warpgroup_hunts.EXERCISES,
     *hopper_backward.EXERCISES, *hopper_backward_hunts.EXERCISES],
    key=lambda e: e.number)
