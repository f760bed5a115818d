"""Exercises over the stages, and bug hunts: `python -m tutorials.exercises list`."""

from .catalog import EXERCISES
from .exercise import Change, Exercise, Mutant
from .grade import Verdict
from .handed_in import problem_of
from .process import check_file

__all__ = ["EXERCISES", "Change", "Exercise", "Mutant", "Verdict", "check_file", "find", "problem_of"]


def find(number: int) -> Exercise:
    """The exercise of this number.

    Raises:
        ValueError: if there is none.
    """
    found = next((e for e in EXERCISES if e.number == number), None)
    if found is None:
        raise ValueError(f"there is no exercise {number}; there are 1 to {len(EXERCISES)}")
    return found
