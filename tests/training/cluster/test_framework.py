"""Plans for frameworks: their own parsers read them, and what they cannot run is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebench.errors import InputError, UnknownName
from tunebench.training.cluster import ClusterPlan, TrainingJob, emit
from tunebench.workloads.networks import network

JOB = TrainingJob(network=network("llama-3-8b"), batch=128, seq=4096)


def plan(**changed: object) -> ClusterPlan:
    values = {
        "nodes": 2,
        "tensor": 2,
        "pipeline": 1,
        "data": 8,
        "chunks": 1,
        "microbatch": 2,
        "recompute": "none",
        "sequence_parallel": False,
        "flash": True,
        "sharding": "optimizer",
    }
    return ClusterPlan(**{**values, **changed})  # type: ignore[arg-type]


PIPELINE = plan(nodes=4, pipeline=2, chunks=4, sequence_parallel=True, recompute="full")


def options(text: str) -> dict[str, str]:
    """Return the options of a command and their values."""
    words = shlex.split(text.replace("\\\n", " "))
    names = [index for index, word in enumerate(words) if word.startswith("--")]
    next_names = [*names[1:], len(words)]
    return {words[at]: " ".join(words[at + 1 : end]) for at, end in zip(names, next_names, strict=True)}


def test_megatron_has_network_degrees_and_schedule() -> None:
    arguments = options(emit("megatron", PIPELINE, JOB).text)
    assert (arguments["--nnodes"], arguments["--nproc-per-node"]) == ("4", "8 pretrain_gpt.py")
    assert (arguments["--num-layers"], arguments["--num-query-groups"]) == ("32", "8")
    assert arguments["--num-layers-per-virtual-pipeline-stage"] == "4"
    assert arguments["--recompute-granularity"] == "full"
    for name in ("--sequence-parallel", "--use-distributed-optimizer", "--swiglu", "--bf16"):
        assert arguments[name] == ""


def test_uneven_stages_have_a_layout() -> None:
    uneven = replace(PIPELINE, chunks=2, embedding_layers=1, head_layers=1)
    arguments = options(emit("megatron", uneven, JOB).text)
    assert arguments["--pipeline-model-parallel-layout"] == "Et*8|t*9|t*8|t*7L"
    assert "--num-layers-per-virtual-pipeline-stage" not in arguments
    rank = replace(PIPELINE, chunks=1, head_layers=3, recompute="none")
    arguments = options(emit("megatron", rank, JOB).text)
    assert arguments["--pipeline-model-parallel-layout"] == "Et*18|t*14L"
    arguments = options(emit("torchtitan", rank, JOB).text)
    assert arguments["--parallelism.pipeline-parallel-last-stage-less-layers"].split()[0] == "3"
    assert arguments["--parallelism.pipeline-parallel-layers-per-stage"] == "18"


def test_recomputation_by_layers_and_gathered_keys_have_their_arguments() -> None:
    some = plan(recompute="full", recompute_layers=3, context=2, data=4, context_gather=True)
    arguments = options(emit("megatron", some, JOB).text)
    assert (arguments["--recompute-method"], arguments["--recompute-num-layers"]) == ("block", "3")
    assert arguments["--cp-comm-type"] == "allgather"
    ring = replace(some, context_gather=False, recompute_layers=0)
    arguments = options(emit("megatron", ring, JOB).text)
    assert (arguments["--recompute-method"], arguments["--recompute-num-layers"]) == ("uniform", "1")
    assert arguments["--cp-comm-type"] == "p2p"
    notes = emit("deepspeed", plan(recompute="full", recompute_layers=3), JOB).notes
    assert any("the first 3 layers" in note for note in notes)
    for gathered, strategy in ((True, "allgather"), (False, "alltoall")):
        text = emit("fsdp", plan(context=2, data=4, context_gather=gathered), JOB).text
        assert f"parallelism_config_cp_comm_strategy: {strategy}" in text


@pytest.mark.parametrize(
    ("schedule", "chunks", "name", "layers"),
    [
        ("1f1b", 1, "1F1B", 8),
        ("1f1b", 2, "Interleaved1F1B", 4),
        ("zbv", 1, "ZBVZeroBubble", 4),
        ("interleaved-zb", 2, "InterleavedZeroBubble", 4),
    ],
)
def test_schedules_of_torchtitan_are_those_of_torch(
    schedule: str, chunks: int, name: str, layers: int
) -> None:
    pipeline_plan = plan(pipeline=4, data=2, chunks=chunks, schedule=schedule)
    emitted = emit("torchtitan", pipeline_plan, JOB)
    arguments = options(emitted.text)
    assert arguments["--parallelism.pipeline-parallel-schedule"] == name
    assert arguments["--parallelism.pipeline-parallel-layers-per-stage"] == str(layers)
    assert any("torch.compile" in note for note in emitted.notes) == (schedule != "1f1b")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert schedules.get_schedule_class(name).__name__ == f"Schedule{name}"


def test_only_megatron_multiplies_8_bit_floats() -> None:
    job = replace(JOB, fp8="current")
    arguments = options(emit("megatron", PIPELINE, job).text)
    assert (arguments["--fp8-format"], arguments["--fp8-recipe"]) == ("hybrid", "tensorwise")
    with pytest.raises(InputError, match="leave out --fp8"):
        emit("deepspeed", plan(), job)


def test_torchtitan_divides_the_devices_and_the_batch() -> None:
    arguments = options(emit("torchtitan", PIPELINE, JOB).text)
    degrees = [
        int(arguments[f"--parallelism.{name}-degree"])
        for name in (
            "data-parallel-replicate",
            "data-parallel-shard",
            "tensor-parallel",
            "pipeline-parallel",
        )
    ]
    assert degrees == [1, 8, 2, 2]
    assert arguments["--training.local-batch-size"] == "16"  # of a pipeline: all its micro-batches
    assert arguments["--parallelism.pipeline-parallel-layers-per-stage"] == "4"
    assert (
        arguments["--parallelism.pipeline-parallel-last-stage-less-layers"] == "0 activation-checkpoint:full"
    )
    assert options(emit("torchtitan", plan(), JOB).text)["--training.local-batch-size"] == "2"


def test_options_of_torchtitan_are_read_by_its_parser() -> None:
    tyro = pytest.importorskip("tyro", reason="torchtitan and tyro are not installed")
    configs = pytest.importorskip("torchtitan.config.configs")
    words = [f"{name}={value}" for name, value in options(emit("torchtitan", PIPELINE, JOB).text).items()]
    read = tyro.cli(
        configs.ParallelismConfig,
        args=[
            word.replace("--parallelism.", "--").partition(" ")[0]
            for word in words
            if "--parallelism" in word
        ],
    )
    assert (read.tensor_parallel_degree, read.pipeline_parallel_layers_per_stage) == (2, 4)


def test_batch_of_deepspeed_is_that_of_the_plan() -> None:
    configuration = json.loads(emit("deepspeed", plan(states="host"), JOB).text)
    micro, steps = (
        configuration["train_micro_batch_size_per_gpu"],
        configuration["gradient_accumulation_steps"],
    )
    assert configuration["train_batch_size"] == micro * steps * plan().data == 128
    assert configuration["zero_optimization"]["stage"] == 1
    assert configuration["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert configuration["tensor_parallel"] == {"autotp_size": 2}


def test_deepspeed_places_states_parameters_and_activations() -> None:
    stored = plan(
        tensor=1,
        data=16,
        sharding="full",
        states="nvme",
        parameters="host",
        activations="host",
        recompute="full",
    )
    configuration = json.loads(emit("deepspeed", stored, JOB).text)
    zero = configuration["zero_optimization"]
    assert zero["stage"] == 3
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == ("nvme", "cpu")
    assert configuration["activation_checkpointing"]["cpu_checkpointing"]
    two = plan(sharding="gradients", states="host")
    assert json.loads(emit("deepspeed", two, JOB).text)["zero_optimization"]["stage"] == 2


def test_configuration_of_deepspeed_is_read_by_its_parser() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config", reason="deepspeed is not installed")
    configuration = json.loads(emit("deepspeed", plan(tensor=1, data=16, sharding="full"), JOB).text)
    assert zero.DeepSpeedZeroConfig(**configuration["zero_optimization"]).stage == 3


@pytest.mark.parametrize(("sharding", "reshard"), [("full", True), ("optimizer", False)])
def test_configuration_of_fsdp_is_read_by_accelerate(tmp_path: Path, sharding: str, reshard: bool) -> None:
    arguments = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    path = tmp_path / "fsdp.yaml"
    path.write_text(emit("fsdp", plan(sharding=sharding), JOB).text, encoding="utf-8")
    read = arguments.load_config_from_file(str(path))
    assert (read.distributed_type.value, read.mixed_precision) == ("FSDP", "bf16")
    assert (read.num_machines, read.num_processes) == (2, 16)
    assert read.fsdp_config["fsdp_reshard_after_forward"] is reshard
    degrees = {
        name.removeprefix("parallelism_config_"): size for name, size in read.parallelism_config.items()
    }
    assert degrees == {"dp_shard_size": 8, "tp_size": 2, "cp_size": 1}


@pytest.mark.parametrize(
    ("framework", "impossible", "expected"),
    [
        ("deepspeed", PIPELINE, "--fix pipeline=1"),
        ("deepspeed", plan(sequence_parallel=True), "--fix sequence_parallel=no"),
        ("deepspeed", plan(sharding="full"), "--fix tensor=1"),
        ("deepspeed", plan(context=2), "--fix context=1"),
        ("fsdp", plan(sharding="none"), "--fix sharding=optimizer"),
        ("fsdp", plan(states="host"), "--fix states=device"),
        ("fsdp", plan(sharding="full", states="host", parameters="host"), "--fix parameters=device"),
        ("megatron", plan(states="nvme"), "--fix states=device"),
        ("megatron", plan(sharding="gradients", states="host"), "--fix sharding=optimizer"),
        ("deepspeed", plan(states="nvme"), "--fix states=device"),
        ("torchtitan", plan(sharding="none"), "--fix sharding=optimizer"),
        ("megatron", plan(pipeline=2, schedule="zb-h1"), "--fix schedule=1f1b"),
        ("torchtitan", plan(pipeline=2, schedule="v-half"), "--fix schedule=1f1b"),
        ("torchtitan", plan(recompute="full", recompute_layers=2), "--fix recompute_layers=0"),
        ("fsdp", plan(recompute="full", recompute_layers=2), "--fix recompute_layers=0"),
        ("torchtitan", plan(context=2), "--fix context_gather=yes"),
    ],
)
def test_what_a_framework_cannot_run_is_refused(
    framework: str, impossible: ClusterPlan, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        emit(framework, impossible, JOB)


def test_unknown_framework_is_named() -> None:
    with pytest.raises(UnknownName, match="megatron"):
        emit("megatorn", plan(), JOB)


EXPERTS = TrainingJob(network=network("mixtral-8x22b"), batch=128, seq=4096, capacity_factor=1.25)


def test_experts_are_those_of_the_plan() -> None:
    arguments = options(
        emit("megatron", plan(expert=8, recompute="experts", sequence_parallel=True), EXPERTS).text
    )
    assert (arguments["--num-experts"], arguments["--moe-router-topk"]) == ("8", "2")
    assert arguments["--moe-ffn-hidden-size"] == "16384"
    assert (arguments["--expert-model-parallel-size"], arguments["--expert-tensor-parallel-size"]) == (
        "8",
        "1",
    )
    assert (arguments["--recompute-granularity"], arguments["--recompute-modules"]) == ("selective", "moe")
    assert arguments["--moe-expert-capacity-factor"] == "1.25"
    assert "--moe-grouped-gemm" in arguments
    assert "--num-experts" not in options(emit("megatron", PIPELINE, JOB).text)
    titan = options(emit("torchtitan", plan(expert=8, sequence_parallel=True), EXPERTS).text)
    assert titan["--parallelism.expert-parallel-degree"] == "8"


def test_layers_of_current_models_are_arguments_of_megatron() -> None:
    deepseek = TrainingJob(network=network("deepseek-v3"), batch=128, seq=4096)
    text = emit("megatron", plan(expert=8, sequence_parallel=True), deepseek).text
    arguments = options(text)
    assert (arguments["--qk-head-dim"], arguments["--v-head-dim"]) == ("128", "128")
    assert arguments["--moe-layer-freq"] == "[0]*3+[1]*58"
    assert (arguments["--moe-router-num-groups"], arguments["--moe-router-group-topk"]) == ("8", "4")
    assert arguments["--ffn-hidden-size"] == "18432"
    assert "--moe-shared-expert-gate" not in text
    windows = options(
        emit("megatron", plan(), TrainingJob(network=network("mistral-7b"), batch=128, seq=8192)).text
    )
    assert windows["--window-size"] == "4095,0"
    oss = TrainingJob(network=network("gpt-oss-120b"), batch=128, seq=4096)
    arguments = options(emit("megatron", plan(expert=8, sequence_parallel=True), oss).text)
    assert arguments["--window-attn-skip-freq"] == f"[{','.join('10' * 18)}]"
    assert arguments["--softmax-type"] == "learnable"
    with pytest.raises(InputError, match="no argument for normalisations after attention"):
        emit("megatron", plan(), TrainingJob(network=network("gemma-2-9b"), batch=128, seq=4096))


@pytest.mark.parametrize(
    ("framework", "changed", "expected"),
    [
        ("torchtitan", {"expert_tensor": 2}, "expert_tensor=1"),
        ("torchtitan", {"recompute": "experts"}, "recompute=full"),
        ("deepspeed", {"expert": 8}, "expert=1"),
        ("fsdp", {"expert": 8}, "expert=1"),
    ],
)
def test_frameworks_refuse_experts_that_they_cannot_divide(
    framework: str, changed: dict[str, object], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        emit(framework, plan(**changed), EXPERTS)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({}, "--grad-reduce-in-bf16"),
        ({"wide_gradients": True}, "--accumulate-allreduce-grads-in-fp32"),
        ({"dtype": "f16"}, None),
    ],
)
def test_megatron_sums_gradients_as_planned(changes: dict[str, Any], argument: str | None) -> None:
    arguments = options(emit("megatron", PIPELINE, replace(JOB, **changes)).text)
    both = {"--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"}
    assert both & set(arguments) == ({argument} if argument else set())
