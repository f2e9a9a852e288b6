"""Checks across keys: each reports its key and what to set."""

import logging
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from lockstep.config import checks
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.generation import GenerationConfig
from lockstep.config.placement import need_critic
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import flat_values, keys, out_of_bounds, to_dataclass
from lockstep.config.sft import SFTConfig
from tests.hub import use_hub


def test_minimal_configuration_passes(minimal: list[str]) -> None:
    load_config(PPOConfig, minimal)


ROOTS = (PPOConfig, SFTConfig, RMConfig, DPOConfig, GenerationConfig)


@pytest.mark.parametrize("cls", ROOTS)
def test_defaults_are_in_bounds(cls: type) -> None:
    assert list(out_of_bounds(cls, flat_values(to_dataclass(cls, {})))) == []


@pytest.mark.parametrize("cls", ROOTS)
def test_a_field_that_replaces_a_bounded_one_has_the_same_bound(cls: type) -> None:
    for key in keys(cls).values():
        for base in key.owner.__mro__:
            replaced = keys(base).get(key.field) if is_dataclass(base) else None
            assert replaced is None or replaced.bound == key.bound, f"{key.name} in {base.__name__}"


def test_required_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [])
    assert [problem.key for problem in caught.value.problems] == ["data.train_files", "actor_rollout_ref.model.path"]


ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_files=nowhere.parquet"], "data.train_files=nowhere.parquet: no such file"),
        (["data.val_files=nowhere.parquet"], "data.val_files=nowhere.parquet: no such file"),
        (["actor_rollout_ref.model.path=./qwen"], "model.path=./qwen: no such folder (looked for "),
        (["actor_rollout_ref.model.path=Qwen2.5"], "model.path=Qwen2.5: no such folder (looked for "),
        (["actor_rollout_ref.model.path=s9://a/b"], "model.path=s9://a/b: unknown protocol s9://"),
        (["actor_rollout_ref.model.tokenizer_path=nowhere"], "model.tokenizer_path=nowhere: no such folder"),
        (["data.tokenizer=nowhere"], "data.tokenizer=nowhere: no such folder"),
        (["data.train_files=[org/name:a:b:c]"], "data.train_files=org/name:a:b:c: no such file or folder; give"),
        (
            ["data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=256"],
            f"{ACTOR}.ppo_mini_batch_size=256: is larger than data.train_batch_size=128",
        ),
        (["data.train_batch_size=300"], f"{ACTOR}.ppo_mini_batch_size=256: does not divide data.train_batch_size=300"),
        (["critic.ppo_mini_batch_size=300"], "critic.ppo_mini_batch_size=300: does not divide"),
        ([f"{ACTOR}.ppo_epochs=0"], f"{ACTOR}.ppo_epochs=0: must be greater than 0"),
        ([f"{ACTOR}.clip_ratio=-0.1"], f"{ACTOR}.clip_ratio=-0.1: must be 0 or more"),
        ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p=0.0: must be greater than 0 and at most 1"),
        ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k=0: must be 1 or more, or -1 for all"),
        ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature=0: sampling needs a temperature above 0"),
        ([f"{ROLLOUT}.val_kwargs.do_sample=true"], f"{ROLLOUT}.val_kwargs.temperature=0: sampling needs a temperature"),
        ([f"{ROLLOUT}.max_model_len=100"], f"{ROLLOUT}.max_model_len=100: prompt_length + response_length is 1024"),
        ([f"{ROLLOUT}.prompt_length=100"], f"{ROLLOUT}.prompt_length=100: is less than data.max_prompt_length=512"),
        (
            ["trainer.save_freq=-2"],
            "trainer.save_freq=-2: must be 1 or more, -1 for only the last step, or 0 for never",
        ),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps=0: must be 1 or more, or null"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path: must be the global_step_N folder"),
        (["critic.enable=false"], "critic.enable=false: gae needs a critic"),
        (["critic=null"], "critic.enable=false: gae needs a critic"),
        (["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1: grpo compares the samples of one prompt"),
        (["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n=1: rloo compares the samples of one prompt"),
        ([f"{ACTOR}.use_kl_loss=true", f"{REF}=null"], f"{ACTOR}.use_kl_loss=true: KL needs a reference policy"),
        (["algorithm.use_kl_in_reward=true", "ref=null"], f"reference policy, but {REF}.enable is false"),
        (
            [f"{ACTOR}.policy_loss.rollout_correction.rollout_is=token"],
            "rollout_correction.rollout_is=token: must equal algorithm.rollout_correction.rollout_is=None; set only that key",
        ),
        (
            [f"{ROLLOUT}.history_drafts.enable=true", f"{ROLLOUT}.name=hf"],
            f"history_drafts.enable=true: {ROLLOUT}.name=hf has no drafts from history; set false, or {ROLLOUT}.name=embedded",
        ),
        (
            [
                f"{ROLLOUT}.history_drafts.enable=true",
                f"{ROLLOUT}.tensor_model_parallel_size=2",
                "trainer.n_gpus_per_node=2",
            ],
            f"must take the same steps; set false, or {ROLLOUT}.tensor_model_parallel_size=1",
        ),
        (
            [
                f"{ROLLOUT}.exact=true",
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
                "trainer.n_gpus_per_node=2",
            ],
            f"attention split over ranks is not exact; set {ACTOR}.fsdp_config.ulysses_sequence_parallel_size=1",
        ),
        (
            [f"{ROLLOUT}.exact=true", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.fsdp_config.dtype=fp16"],
            f"exact=true: the reference must compute in the actor's dtype; set {REF}.fsdp_config.dtype=fp16, or",
        ),
        ([f"{ROLLOUT}.history_drafts.max_draft_tokens=0"], "history_drafts.max_draft_tokens=0: must be greater than 0"),
        ([f"{ROLLOUT}.history_drafts.max_memory_mb=0"], "history_drafts.max_memory_mb=0: must be greater than 0"),
        (
            [f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=false"],
            "enable_rollout_routing_replay=false: actor_rollout_ref.actor.router_replay.mode=R3 replays the experts of the rollout",
        ),
        (
            [f"{ACTOR}.router_replay.mode=R2", f"{ROLLOUT}.enable_rollout_routing_replay=true"],
            "enable_rollout_routing_replay=true: actor_rollout_ref.actor.router_replay.mode=R2 replays the experts of",
        ),
        (
            [f"{ACTOR}.router_replay.mode=R2", "algorithm.rollout_correction.bypass_mode=true"],
            "router_replay.mode=R2: algorithm.rollout_correction.bypass_mode=true has no old-log-prob pass",
        ),
        (
            [f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.name=hf"],
            "router_replay.mode=R3: actor_rollout_ref.rollout.name=hf does not return the experts of its tokens; set",
        ),
        (
            [f"{ROLLOUT}.enable_rollout_routing_replay=true", f"{ROLLOUT}.name=hf"],
            "enable_rollout_routing_replay=true: actor_rollout_ref.rollout.name=hf does not return the experts",
        ),
        (
            [f"{ACTOR}.router_replay.mode=R2", f"{ACTOR}.strategy=megatron"],
            "router_replay.mode=R2: actor_rollout_ref.actor.strategy=megatron does not give access to the routers of experts",
        ),
        (
            [f"{ACTOR}.router_aux_loss_coef=0.1", f"{ACTOR}.strategy=megatron"],
            "router_aux_loss_coef=0.1: actor_rollout_ref.actor.strategy=megatron does not give access",
        ),
        ([f"{ACTOR}.router_replay.mode=r3"], f"{ACTOR}.router_replay.mode=r3: must be one of disabled, R2, R3"),
        ([f"{ACTOR}.router_aux_loss_coef=-1"], f"{ACTOR}.router_aux_loss_coef=-1.0: must be 0 or more"),
        ([f"{REF}.router_replay.mode=R2"], "not supported: the reference policy chooses its own experts"),
        ([f"{ACTOR}.router_replay.record_file=a"], "not supported: experts are recorded in the batch, not in files"),
        ([f"{ACTOR}.loss_agg_mode=mean"], f"{ACTOR}.loss_agg_mode=mean: must be one of token-mean, token-sum"),
        ([f"{ACTOR}.kl_loss_type=k4"], f"{ACTOR}.kl_loss_type=k4: must be one of kl, abs, mse, low_var_kl"),
        (
            ["algorithm.filter_groups.enable=true"],
            f"{ROLLOUT}.n=1: algorithm.filter_groups compares the samples of one prompt",
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=false"],
            "algorithm.rollout_correction.rollout_is=token: needs the rollout's log-probs",
        ),
        (
            ["data.sampler.class_path=pkg://m"],
            "data.sampler.class_name: must name the class in data.sampler.class_path",
        ),
        (
            ["data.sampler={class_path: pkg://m, class_name: A}", "data.dataloader_num_workers=2"],
            "data.dataloader_num_workers=2: a custom sampler runs in the controller; set 0",
        ),
        (
            ["algorithm.kl_penalty=full"],
            "algorithm.kl_penalty=full: not supported: KL is estimated from the sampled",
        ),
        (
            ["actor_rollout_ref.hybrid_engine=false"],
            "hybrid_engine=false: not supported: set true, and trainer.placement=split to separate",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.name=hf", "trainer.n_gpus_per_node=2"],
            f"not supported: each worker holds the whole rollout model; set 1, or {ROLLOUT}.name=embedded or vllm",
        ),
        (
            [f"{ROLLOUT}.n_gpus=3", f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4"],
            "n_gpus=3: is not a multiple of tensor_model_parallel_size=2",
        ),
        ([f"{ROLLOUT}.n_gpus=8", "trainer.n_gpus_per_node=4"], "n_gpus=8: is more than the 4 workers of the actor"),
        (
            [f"{ROLLOUT}.n_gpus=1", "trainer.placement=split", "trainer.n_gpus_per_node=4"],
            "n_gpus=1: the rollout has its own pool",
        ),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], "does not divide the number of workers in global_pool (1)"),
        ([f"{ROLLOUT}.over_sample_rate=1"], "over_sample_rate=1.0: must be at least 0 and below 1"),
        ([f"{ROLLOUT}.over_sample_rate=0.1", f"{ROLLOUT}.mode=sync"], f"set {ROLLOUT}.mode=async"),
        ([f"{ROLLOUT}.over_sample_rate=0.1", "trainer.async_mode=colocated"], "instead of aborting them; set 0"),
        (["reward_model.enable=true"], "reward_model.model.path: must be the reward model; give a local folder"),
        (["custom_reward_function.path=nowhere.py"], "custom_reward_function.path=nowhere.py: no such file"),
        (["data.custom_cls.path=pkg://m"], "data.custom_cls.name: must name the class"),
        (
            [f"{ACTOR}.checkpoint.save_contents=[model,optim]"],
            f"{ACTOR}.checkpoint.save_contents=[model,optim]: must be a list, each item one of model, optimizer",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000: a sequence can have 1024 tokens",
        ),
        (["trainer.on_hang=restart"], "trainer.on_hang=restart: no restart is allowed; set trainer.max_restarts"),
        (
            ["trainer.on_hang=stop", "trainer.watchdog.enable=false"],
            "nothing watches the run; set trainer.watchdog.enable",
        ),
        (
            ["trainer.watchdog.deadlines_s={rewards: 0}"],
            "deadlines_s={rewards:0}: must be seconds greater than 0, by name",
        ),
        (
            ["trainer.watchdog.deadlines_s={reward: 60, generate: 60}"],
            "trainer.watchdog.deadlines_s=reward: no such phase. Did you mean 'rewards'? Known: advantages, between phases",
        ),
        (["trainer.watchdog.deadlines_s={rewards: soon}"], "must be seconds greater than 0, by name"),
    ],
)
def test_each_mistake_is_one_problem(minimal: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *overrides])
    assert len(caught.value.problems) == 1, caught.value
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("actor", "ref", "more"),
    [
        ("bf16", "bfloat16", []),
        ("bf16", "auto", ["trainer.device=cuda"]),
        ("auto", "float32", ["trainer.device=cpu"]),
        ("fp16", "auto", ["actor_rollout_ref.model.lora_rank=4"]),  # the actor is the reference
    ],
)
def test_an_exact_reference_computes_in_the_actors_dtype(
    minimal: list[str], actor: str, ref: str, more: list[str]
) -> None:
    dtypes = [f"{ACTOR}.fsdp_config.dtype={actor}", f"{REF}.fsdp_config.dtype={ref}"]
    load_config(PPOConfig, [*minimal, f"{ROLLOUT}.exact=true", f"{ACTOR}.use_kl_loss=true", *dtypes, *more])


def test_folder_without_a_model(minimal: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(PPOConfig, [*minimal, f"actor_rollout_ref.model.path={tmp_path}"])


def test_data_folders_are_checked(minimal: list[str], files: dict[str, str], tmp_path: Path) -> None:
    load_config(PPOConfig, [*minimal, f"data.train_files={tmp_path}"])  # has train.parquet
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.train_files=.*empty: has no \.parquet, \.jsonl or \.json file"):
        load_config(PPOConfig, [*minimal, f"data.train_files={tmp_path}/empty"])
    custom = ["data.custom_cls={path: pkg://m, name: A}"]  # may read folders of its own
    load_config(PPOConfig, [*minimal, *custom, f"data.train_files={tmp_path}/empty"])


def test_names_on_the_hub_are_accepted(minimal: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, tmp_path / "cache")
    names = ["actor_rollout_ref.model.path=org/name@main", "data.train_files=[org/data:main:train,org/other]"]
    load_config(PPOConfig, [*minimal, *names])
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *names])
    assert [problem.key for problem in caught.value.problems] == 2 * ["data.train_files"] + [
        "actor_rollout_ref.model.path"
    ]
    assert "run `hf download org/name --revision main` with network access" in str(caught.value)


def test_unused_critic_is_not_checked(minimal: list[str]) -> None:
    load_config(PPOConfig, [*minimal, "algorithm=grpo", "critic.model.path=nowhere", "critic.ppo_mini_batch_size=7"])


def test_mistyped_key_is_reported_once(minimal: list[str]) -> None:
    overrides = [*minimal, "data.train_batch_size=many", f"{ACTOR}.ppo_mini_batch_size=1000"]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, overrides)
    assert [problem.key for problem in caught.value.problems] == ["data.train_batch_size"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ACTOR}.clip_ratio_low=0.8"], "clip_ratio_low=0.8 is a distance from 1: the ratio is clipped at 1-0.8=0.2"),
        (
            ["algorithm.adv_estimator=grpo"],
            f"{ROLLOUT}.n is not set; using 5, because grpo compares the samples of a prompt",
        ),
        (
            [f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"],
            "KL is penalized in the reward and in the loss",
        ),
        ([f"{ROLLOUT}.n=4", f"{ROLLOUT}.do_sample=false"], "the 4 samples of a prompt will be identical"),
        ([f"{ROLLOUT}.response_length=64"], "response_length=64 differs from data.max_response_length=512"),
        (["trainer.resume_from_path=x"], "is used only with trainer.resume_mode=resume_path, not auto"),
        (["trainer.hdfs_wait_s=10"], "trainer.hdfs_wait_s=10 has no effect: set trainer.default_hdfs_dir"),
        (
            ["trainer.default_hdfs_dir=s3://b/x", "trainer.save_freq=0"],
            "nothing is copied, because trainer.save_freq=0",
        ),
        (["trainer.test_freq=5"], "trainer.test_freq=5 without data.val_files"),
        ([f"{ACTOR}.kl_loss_coef=0.1"], f"{ACTOR}.kl_loss_coef=0.1 has no effect: {ACTOR}.use_kl_loss is false"),
        (["algorithm.adv_estimator=grpo", "algorithm.gamma=0.9"], "algorithm.gamma=0.9 has no effect: grpo does not"),
        (
            ["algorithm.adv_estimator=grpo", "critic.optim.lr=0.5"],
            "critic.optim.lr=0.5 has no effect: grpo has no critic",
        ),
        ([f"{ROLLOUT}.dtype=float16"], f"{ROLLOUT}.dtype=float16 has no effect"),
        (["ray_init.timeline_json_file=t.json"], "timeline_json_file=t.json has no effect: the run does not use Ray"),
        ([f"{ROLLOUT}.name=naive"], f"{ROLLOUT}.name=naive is read as hf"),
        (["trainer.max_restarts=2"], "trainer.max_restarts without trainer.save_freq: there are no checkpoints"),
    ],
)
def test_likely_mistakes_are_warnings(
    minimal: list[str], overrides: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*minimal, *overrides])
    assert message in caplog.text


def test_a_validation_has_no_dashboard(minimal: list[str], caplog: pytest.LogCaptureFixture) -> None:
    validation = minimal[0].replace("train_files", "val_files")
    load_config(PPOConfig, [*minimal, validation, "trainer.dashboard=true", "trainer.val_only=true"])
    assert "trainer.dashboard=true has no effect: trainer.val_only=true trains nothing" in caplog.text


@pytest.mark.parametrize(("loss", "low", "high"), [("vanilla", 0.2, 0.2), ("gspo", 0.2, 0.2), ("cispo", 0.8, 1.2)])
def test_clip_ratios_around_1_are_bounds(minimal: list[str], loss: str, low: float, high: float) -> None:
    bounds = [f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.2"]
    actor = load_config(PPOConfig, [*minimal, *bounds, f"{ACTOR}.policy_loss.loss_mode={loss}"]).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == pytest.approx((low, high))


def test_vllm_needs_its_package(minimal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'rollout\.name=vllm: needs vLLM: pip install "lockstep-rl\[vllm\]"'):
        load_config(PPOConfig, [*minimal, f"{ROLLOUT}.name=vllm"])


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_tensor_parallel_size_divides_the_rollouts_workers(
    minimal: list[str], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    settings = [*minimal, f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    config = load_config(PPOConfig, [*settings, "trainer.n_gpus_per_node=4"])
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=2: does not divide .* global_pool \(3\)"):
        load_config(PPOConfig, [*settings, "trainer.n_gpus_per_node=3"])


def test_the_run_says_which_log_probs_of_vllm_it_trains_on(
    minimal: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    settings = [*minimal, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.top_p=0.9"]
    load_config(PPOConfig, settings)
    assert "cut distribution" not in caplog.text
    load_config(PPOConfig, [*settings, f"{ROLLOUT}.temperature=0.8"])
    assert caplog.text.count("rollout_log_probs are of the cut distribution, old_log_probs of the full one") == 1


TGI = ["name=tgi", "server.urls=[http://a]", "server.reload_command='restart {folder}'"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name=server"], "name=server: not supported without running servers: list them in"),
        (["name=server", "server.urls=[127.0.0.1:8000]"], "server.urls=127.0.0.1:8000: must be a base URL"),
        (
            ["name=server", "server.urls=[http://a:1/v1]"],
            "server.urls=http://a:1/v1: must be a base URL without a path",
        ),
        (["name=server", "server.urls=[http://a,http://a]"], "lists a server twice"),
        (["name=server", "server.urls=[http://a]", "server.kind=llama"], "server.kind=llama"),
        (["name=server", "server.urls=[http://a]", "server.kind=openai"], "has no endpoints for weight updates"),
        (
            ["name=server", "server.urls=[http://a]", "server.timeout_s=0"],
            "server.timeout_s=0.0: must be greater than 0",
        ),
        (["name=sglang", "server.urls=[http://a]", "server.kind=vllm"], "speaks SGLang's protocol"),
        (
            ["name=server", "server.urls=[http://a]", "server.kind=vllm", "server.weight_transfer=tensor"],
            "server.weight_transfer=tensor: servers of kind vllm take weights by file or distributed; set one of these, or auto",
        ),
        (
            ["name=sglang", "server.urls=[http://a]", "server.weight_transfer=file"],
            "servers of kind sglang take weights by tensor or distributed",
        ),
        (
            ["name=sglang", "server.urls=[http://a]", "tensor_model_parallel_size=2"],
            "servers are started with their own parallelism; set 1",
        ),
        (["name=tgi"], "name=tgi: not supported without running servers: list them in"),
        (["name=tgi", "server.urls=[http://a]", "server.kind=vllm"], "name=tgi speaks TGI's protocol"),
        (
            ["name=tgi", "server.urls=[http://a]"],
            f"{ROLLOUT}.name=tgi: such a server has no endpoints for weight updates; set {ROLLOUT}.server.reload_command",
        ),
        (
            ["name=server", "server.urls=[http://a]", "server.kind=tgi"],
            f"{ROLLOUT}.server.kind=tgi: such a server has no endpoints for weight updates; set {ROLLOUT}.server.reload_command",
        ),
        ([*TGI, "ignore_eos=true"], "ignore_eos=true: TGI has no such setting; set false"),
        ([*TGI, "min_p=0.1"], f"{ROLLOUT}.min_p=0.1: TGI has no such setting; set 0.0"),
        ([*TGI, "val_kwargs.min_p=0.1"], "val_kwargs.min_p=0.1: TGI has no such setting; set 0.0"),
        ([*TGI, "server.sleep=true"], "server.sleep=true: not supported with"),
        ([*TGI, "server.weight_transfer=file"], "server.weight_transfer=file: "),
        (
            [*TGI, "server.urls=[http://a,http://b]"],
            "runs once for each server, so it must have {url} among its arguments",
        ),
        ([*TGI, "server.reload_command=restart"], "must have {folder} among its arguments"),
        ([*TGI, 'server.reload_command="restart \'{folder}"'], "cannot be split into arguments (No closing quotation)"),
        ([*TGI, "server.reload_timeout_s=0"], "server.reload_timeout_s=0.0: must be greater than 0"),
    ],
)
def test_servers_are_checked(minimal: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *(f"{ROLLOUT}.{override}" for override in overrides)])
    assert message in str(caught.value)


def test_a_server_that_is_reloaded_can_train(minimal: list[str], caplog: pytest.LogCaptureFixture) -> None:
    more = [*(f"{ROLLOUT}.{override}" for override in TGI), "trainer.default_local_dir=/tmp/some_run"]
    server = load_config(PPOConfig, [*minimal, *more]).actor_rollout_ref.rollout.server
    assert server.reload_command == "restart {folder}" and server.weights_folder == "/tmp/some_run/rollout_weights"
    assert server.weights_owner == "/tmp/some_run"
    chosen = load_config(PPOConfig, [*minimal, *more, f"{ROLLOUT}.server.weights_folder=/tmp/shared"])
    assert chosen.actor_rollout_ref.rollout.server.weights_folder == "/tmp/shared"
    assert chosen.actor_rollout_ref.rollout.server.weights_owner == "/tmp/some_run"
    for kind in ("vllm", "sglang", "openai"):
        load_config(PPOConfig, [*minimal, *more, f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.kind={kind}"])
    assert "cut distribution" not in caplog.text
    load_config(PPOConfig, [*minimal, *more, f"{ROLLOUT}.top_p=0.9"])
    assert (
        caplog.text.count("name=tgi with top_p, top_k or min_p at temperature 1: rollout_log_probs are of the cut") == 1
    )


def test_an_openai_server_can_serve_a_policy_that_is_not_trained(minimal: list[str]) -> None:
    server = [f"{ROLLOUT}.name=server", f"{ROLLOUT}.server.urls=[http://a]", f"{ROLLOUT}.server.kind=openai"]
    config = load_config(PPOConfig, [*minimal, *server, f"{ACTOR}.optim.lr=0"])
    assert config.actor_rollout_ref.rollout.server.kind == "openai"


def test_all_problems_are_reported_together(minimal: list[str]) -> None:
    overrides = [
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=1",
        f"{ACTOR}.use_kl_loss=true",
        f"{REF}=null",
        "data.train_batch_size=100",
        f"{ACTOR}.ppo_mini_batch_size=64",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=300",  # 900 for the three ranks of a sequence
        f"{ROLLOUT}.name=trtllm",
        f"{ROLLOUT}.multi_turn.num_repeat_rollouts=2",
        f"{ACTOR}.ulysses_sequence_parallel_size=3",
        "trainer.n_gpus_per_node=8",
        "trainer.logger=[console,vemlp_wandb]",
        "actor_rollout_ref.model.lora_rank=-1",
        "data.train_file=x",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *overrides])
    assert {problem.key for problem in caught.value.problems} == {
        f"{ROLLOUT}.n",
        f"{ACTOR}.use_kl_loss",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ROLLOUT}.name",
        f"{ROLLOUT}.multi_turn.num_repeat_rollouts",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "trainer.logger",
        "actor_rollout_ref.model.lora_rank",
        "data.train_file",
    }
    assert len(caught.value.problems) == 10
    unsupported = [problem.key for problem in caught.value.problems if "not supported" in problem.message]
    assert unsupported == [
        "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts",
        "actor_rollout_ref.rollout.name",
        "trainer.logger",
    ]


def test_reference_can_be_disabled(minimal: list[str]) -> None:
    config = load_config(PPOConfig, [*minimal, "ref=null"])
    assert config.actor_rollout_ref.ref.enable is False


OWN_ESTIMATOR = "def own(token_level_rewards, response_mask, values, index):\n    return token_level_rewards, values\n"


def test_own_estimator_gets_a_critic_and_groups_by_its_signature(
    minimal: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN_ESTIMATOR)
    overrides = [*minimal, f"algorithm.adv_estimator={tmp_path}/own.py:own"]
    config = load_config(PPOConfig, overrides)
    assert need_critic(config) and config.actor_rollout_ref.rollout.n == 5
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*overrides, "critic.model.path=nowhere", f"{ROLLOUT}.n=1"])
    assert [problem.key for problem in caught.value.problems] == ["critic.model.path", f"{ROLLOUT}.n"]
    with pytest.raises(ConfigError, match=r"critic\.enable=false: .*own needs a critic"):
        load_config(PPOConfig, [*overrides, "critic.enable=false"])


def test_registered_estimator_gets_a_critic(minimal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.algorithms.advantages.registry import ADVANTAGE_ESTIMATORS, register_adv_est

    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", {})
    monkeypatch.setattr("lockstep.config.estimators.ESTIMATOR_INPUTS", inputs := {})
    monkeypatch.setattr("lockstep.algorithms.advantages.registry.ESTIMATOR_INPUTS", inputs)
    register_adv_est("critic_based")(lambda token_level_rewards, values, **kwargs: (token_level_rewards, values))
    assert need_critic(load_config(PPOConfig, [*minimal, "algorithm.adv_estimator=critic_based"]))


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ("gpro", r"algorithm\.adv_estimator=gpro: no such advantage estimator\. Did you mean 'grpo'"),
        ("nowhere.py:own", r"algorithm\.adv_estimator=nowhere\.py:own: no file"),
        ("no_such_module:own", r"algorithm\.adv_estimator=no_such_module:own: No module named"),
    ],
)
def test_unknown_estimator_is_one_problem(minimal: list[str], estimator: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(PPOConfig, [*minimal, f"algorithm.adv_estimator={estimator}"])
    assert len(caught.value.problems) == 1


def test_token_budgets_of_models_that_a_run_lacks_are_not_checked(minimal: list[str]) -> None:
    lengths = ["data.max_response_length=40000", f"{ACTOR}.ppo_max_token_len_per_gpu=50000"]
    load_config(PPOConfig, [*minimal, *lengths, "algorithm.adv_estimator=grpo"])
    with pytest.raises(ConfigError, match=r"critic.ppo_max_token_len_per_gpu=32768: a sequence can have"):
        load_config(PPOConfig, [*minimal, *lengths, "algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=true"])
