"""Names of plug-ins that a config can select, so that it is checked before torch is imported.

Registering another one adds its name; see `Registry`.
"""

POLICY_LOSSES = {
    *("vanilla", "bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv"),
    *("dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
}
PREPARATION = "preparation of a policy loss"
"""Kind of the registry of functions that prepare a whole mini-batch for a loss."""
PREPARED_LOSSES = {"clip_cov", "geo_mean", "kl_cov"}
"""Policy losses that have one."""
REWARD_MANAGERS = {"naive", "batch", "dapo", "functions", "prime", "rate_limited"}
