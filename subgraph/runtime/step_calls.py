"""Calls of the default executor's steps, with code generated for their numbers of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

from subgraph.runtime.executor_plan import Step

# Computes the outputs of a step from its inputs, one item each.
Run = Callable[[Sequence[Any]], Sequence[Any]]
# Runs a step on the values of a run: reads its input slots, writes its output slots.
StepCall = Callable[[list[Any]], None]


def step_call(step: Step, inputs: Sequence[int], run: Run) -> StepCall:
    """Return a callable that runs a step on the values of a run and frees its last-read slots.

    Args:
        step: The step.
        inputs: Slots of the inputs that ``run`` takes; a session may need fewer than the step has.
        run: Computes the step's outputs.
    """
    make = _maker(len(inputs), len(step.outputs), len(step.free))
    return make(run, *inputs, *step.outputs, *step.free)


@cache
def _maker(inputs: int, outputs: int, free: int) -> Callable[..., StepCall]:
    """Return a function that makes the calls of steps with these numbers of slots.

    Its code is generated for the numbers: between two small regions of a model, loops over the
    slots would take most of the time.
    """
    sources, targets, freed = (
        [f"{letter}{k}" for k in range(count)]
        for letter, count in (("i", inputs), ("o", outputs), ("f", free))
    )

    def items(slots: Sequence[str]) -> str:
        return f"[{', '.join(f'values[{slot}]' for slot in slots)}]"

    clear = "".join(f"values[{slot}] = " for slot in freed)
    text = (
        f"def make({', '.join(('run', *sources, *targets, *freed))}):\n"
        "    def call(values):\n"
        f"        {items(targets)} = run({items(sources)})\n"
        f"        {clear}None\n"
        "    return call\n"
    )
    scope: dict[str, Any] = {}
    exec(text, scope)
    return cast("Callable[..., StepCall]", scope["make"])
