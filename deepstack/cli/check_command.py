"""The command `deepstack check CONFIG`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepstack import config as conf
from deepstack.base.gc_control import gc_paused
from deepstack.cli.commands import command
from deepstack.cli.options import (
    ConfigFile,
    Json,
    Overrides,
    Plugins,
    load_plugins,
    located,
    note_empty,
)
from deepstack.cli.output import emit_facts, show_work
from deepstack.cli.study_kinds import naming_other_kinds
from deepstack.config import Config

if TYPE_CHECKING:
    from deepstack.schemes import StackScheme

NOT_HERE = "not on this machine: train refuses to start here"


@command("Runs", "deepstack check quick model.depth=1000", place=3)
def check_command(
    config: ConfigFile,
    overrides: Overrides = [],
    plugin: Plugins = [],
    json: Json = False,
) -> None:
    """Check a config and print its coefficients, parameters, memory and FLOPs; train nothing."""
    with naming_other_kinds(config):
        settings = conf.load_config(config, overrides)
    note_empty(config)
    load_plugins(plugin)
    with located(config, overrides), gc_paused(), show_work("building the model"):
        facts = facts_of(settings)
    emit_facts(facts, json)


def facts_of(settings: Config) -> dict[str, Any]:
    """Return the facts that a config determines, as name -> value."""
    from deepstack.model import build_model, tokens_per_step, with_steps
    from deepstack.schemes import stack_schemes
    from deepstack.tasks import task_of
    from deepstack.training import (
        RunPlan,
        bf16_support,
        choose_device,
        device_is_here,
        find_parts,
        memory_limit,
        refuse_cut_settings,
    )

    is_fitted = settings.model.parameters is not None
    settings = with_steps(settings)
    model = settings.model
    widths = {
        "d_model": model.d_model,
        "parameters in the layers' matrices": conf.parameters_at(model, model.d_model),
    }
    task = task_of(settings)
    plan = RunPlan(settings, task)
    evaluation = plan.evaluation()
    counts = build_model(settings, vocab_size=task.vocab_size, device="meta").banks.count()
    plan.check()
    find_parts(plan)
    refuse_cut_settings(settings, plan.ranks)
    flops = plan.flops
    final, disk = plan.disk
    device = choose_device(settings.runtime) if device_is_here(settings.runtime) else None
    where = "GPU" if device is not None and device.type == "cuda" else "machine"
    limit = conf.machine_memory() if device is None else memory_limit(device)
    every = conf.recompute_every(settings)
    here = replace(plan, device=device) if device is not None else None
    executor = here.executor_notice(here.fast_paths()) if here else []
    schemes = stack_schemes(settings)
    first = next(iter(schemes.values())).scheme_class
    half = settings.train.precision == "bf16"
    return {
        "run": plan.name,
        "scheme": f"{first.label}: {first.equation}",
        "family": model.family,
        **coefficients_of(schemes),
        **(widths if is_fitted else {}),
        "steps": settings.train.steps,
        "tokens a step": tokens_per_step(settings, task),
        "FLOPs a step": flops.step,
        "FLOPs a step with the probe": flops.total,
        "FLOPs of the training": settings.train.steps * flops.step,
        "data": task.data.get("name"),
        **({"reading": plan.reading} if plan.reading else {}),
        **{f"validation {name}": number for name, number in evaluation.record.items()},
        **{name.replace("_", " "): value for name, value in evaluation.references.items()},
        **{f"parameters {role}": number for role, number in counts.items()},
        "parameters": sum(counts.values()),
        **({} if device else {"device": f"{settings.runtime.device}, {NOT_HERE}"}),
        **({"bf16": bf16_support(device)} if half and device is not None else {}),
        **({"replay": executor[0]} if executor else {}),
        **({"layers computed twice, at once": every} if every else {}),
        "memory estimate (MB)": round(plan.memory / 1e6),
        f"memory of this {where} (MB)": round(limit / 1e6),
        "disk while it is trained (MB)": round(disk / 1e6, 1),
        "disk when it is done (MB)": round(final / 1e6, 1),
    }


def coefficients_of(schemes: Mapping[str, StackScheme]) -> dict[str, Any]:
    """Return alpha, beta and depth of a stack, or of each side of an encoder-decoder, by name."""
    facts: dict[str, Any] = {}
    for side, scheme in schemes.items():
        of = f" of the {side}" if len(schemes) > 1 else ""
        coefficients = {f"alpha{of}": scheme.alpha, f"beta{of}": scheme.beta}
        facts |= {**coefficients, f"depth{of}": scheme.place.depth}
    return facts
