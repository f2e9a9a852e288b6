"""Configuration: frozen dataclasses define every key once (type, allowed numbers, default, meaning).

The path of a key from the command line to the dataclass:

    lockstep ppo key=value ...
      │  commandline.py        arguments, help text, exit code
      ▼
    compose.py                 presets and the user's YAML (Hydra), then the overrides in order
      │  normalize.py          each source in canonical spelling: aliases applied, unknown and unsupported keys collected
      │  compat.py             the tables behind that: how verl's configurations spell keys, and what is not supported
      │  derived_defaults.py   values that follow from others that were set
      ▼
    schema.py                  interpolations resolved, each value converted to the type of its field, dataclass built
      ▼
    ppo_checks.py              keys that must agree, batches, lengths, worker counts
      │  checks.py             files, models, rollout engines, names: what the programs share
      ▼
    PPOConfig                  ppo.py: the root; algorithm.py, data.py, actor_rollout_ref.py, critic.py, model.py, reward.py,
                               trainer.py: its sections

`lockstep sft`, `rm` and `dpo` take the same path to their own roots (sft.py, preference.py), with sft_compat.py and sft_checks.py.

Each step adds to a list of `Problem`s (errors.py); one ConfigError reports them all. estimators.py lists what each advantage
estimator needs, engines.py what each engine can do, roles.py the sections of each role; placement.py computes worker pools,
reference.py writes docs/config.md. To add a key: a field with a docstring in its section, with a type of bounds.py if its numbers
are bounded, then `make docs-config`. Nothing here imports torch.
"""
