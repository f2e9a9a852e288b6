"""Names of plug-ins that a config can select, so that it is checked before torch is imported.

Registering another one adds its name; see `Registry`.
"""

POLICY_LOSSES = {
    *("vanilla", "bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv"),
    *("dro", "geo_mean", "gpg", "gspo", "kl_cov", "sapo"),
}
TRAIN_ENGINES = {"fsdp", "fsdp2"}
REWARD_MANAGERS = {"naive", "batch", "dapo", "functions", "prime", "rate_limited"}
