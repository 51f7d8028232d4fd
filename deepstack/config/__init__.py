"""Configurations: their settings, reading and checking them, and estimates.  No torch."""

from deepstack.config.estimate import (
    StackSizes,
    depths,
    disk_estimate,
    memory_estimate,
    memory_terms,
    parameter_count,
    width_inside,
)
from deepstack.config.identity import (
    checked_study,
    config_hash,
    digest,
    non_defaults,
    run_name,
    same_experiment,
    study_name,
    values,
)
from deepstack.config.load import (
    checked_config,
    load_config,
    locate,
    parse_config,
    with_overrides,
)
from deepstack.config.schema import (
    ROLES,
    Config,
    Family,
    Init,
    Log,
    Model,
    Muon,
    Norm,
    Runtime,
    Task,
    Train,
)
from deepstack.config.study import Combination, Override, Study, load_study, parse_study
from deepstack.config.sweep import MAX_RUNS, json_schema
from deepstack.config.template import annotated_defaults
from deepstack.config.too_large import available_memory, machine_memory, refuse_absurd
from deepstack.config.write import to_yaml, yaml_of

__all__ = [
    "MAX_RUNS",
    "ROLES",
    "Combination",
    "Config",
    "Family",
    "Init",
    "Log",
    "Model",
    "Muon",
    "Norm",
    "Override",
    "Runtime",
    "StackSizes",
    "Study",
    "Task",
    "Train",
    "annotated_defaults",
    "available_memory",
    "checked_config",
    "checked_study",
    "config_hash",
    "depths",
    "digest",
    "disk_estimate",
    "json_schema",
    "load_config",
    "load_study",
    "locate",
    "machine_memory",
    "memory_estimate",
    "memory_terms",
    "non_defaults",
    "parameter_count",
    "parse_config",
    "parse_study",
    "refuse_absurd",
    "run_name",
    "same_experiment",
    "study_name",
    "to_yaml",
    "values",
    "width_inside",
    "with_overrides",
    "yaml_of",
]
