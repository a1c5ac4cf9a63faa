"""A misspelt argument, or one of another type, is refused with the name that was meant."""

import copy
import inspect
import pickle
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
import torch

import inflight
from inflight.core.arguments import did_you_mean, named, with_plain_numbers
from inflight.core.sampling import SamplingParams
from inflight.fleet.engine import Engine
from inflight.server.options import ServerOptions
from inflight.training.data.rollout_stream import RolloutStream


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(max_token=3), "SamplingParams has no argument 'max_token'; did you mean 'max_tokens'?"),
        (lambda: SamplingParams(max_new_tokens=3), "'max_new_tokens'; did you mean 'max_tokens'?"),
        (lambda: SamplingParams(num_generations=3), "'num_generations'; did you mean 'n'?"),
        (lambda: SamplingParams(zzz=3), "SamplingParams has no argument 'zzz'; it takes n, max_tokens, temperature"),
        (lambda: SamplingParams(8), r"SamplingParams takes its fields by name, got \(8,\)"),
        (lambda: SamplingParams(stop_token_ids=np.array([1, 2])), r"stop_token_ids must be a tuple of integers"),
        (lambda: SamplingParams(temperature="1"), r"SamplingParams.temperature must be a number, got '1' \(str\)"),
        (lambda: SamplingParams(n=True), r"SamplingParams.n must be an integer, got True \(bool\)"),
        (lambda: SamplingParams(n=None), "SamplingParams.n must be an integer, got None"),
        (lambda: SamplingParams(seed=1.5), "SamplingParams.seed must be an integer or None, got 1.5"),
        (lambda: SamplingParams(stop="x"), "SamplingParams.stop must be a tuple of strings, got 'x'"),
        (lambda: SamplingParams(stop_token_ids=["x"]), "must be a tuple of integers"),
        (lambda: SamplingParams(logit_bias={"3": 1.0}), "must be a dict from integers to numbers"),
        (lambda: inflight.launch("tiny", max_sequence=3), "EngineOptions has no argument 'max_sequence'; did you mean"),
        (lambda: inflight.launch("tiny", gpu_memory_utilization=0.9), "did you mean 'kv_cache_fraction'?"),
        (lambda: inflight.launch("tiny", slots="2"), "EngineOptions.slots must be an integer, got '2'"),
        (lambda: inflight.launch(), "EngineOptions: Missing required argument 'model'"),
        (
            lambda: inflight.GRPOConfig(groups_per_steps=3),
            "GRPOConfig has no argument 'groups_per_steps'; did you mean",
        ),
        (lambda: inflight.GRPOConfig(steps="3"), "GRPOConfig.steps must be an integer, got '3'"),
        (lambda: inflight.Objective(kl_weigth=3), "Objective has no argument 'kl_weigth'; did you mean 'kl_weight'?"),
        (lambda: inflight.StalenessRule(max_version_lags=3), "did you mean 'max_version_lag'?"),
        (lambda: inflight.Slots(check_sum=True), "Slots has no argument 'check_sum'; did you mean 'checksum'?"),
        (lambda: inflight.Files("/tmp/x", keeps=3), "Files has no argument 'keeps'"),
        (lambda: inflight.Publisher([], None, transprot=None), "Publisher has no argument 'transprot'; did you mean"),
        (lambda: inflight.attach("tcp://host:1", keyz="x"), "attach has no argument 'keyz'; did you mean 'keys'?"),
        (lambda: ServerOptions(prot=3), "ServerOptions has no argument 'prot'; did you mean 'port'?"),
        (lambda: ServerOptions(port="3"), "ServerOptions.port must be an integer, got '3'"),
        (lambda: Engine.publisher(None, check_finit=True), "publisher has no argument 'check_finit'; did you"),
        (lambda: Engine.submit(None, [], param=3), "submit has no argument 'param'; did you mean 'params'?"),
        (lambda: RolloutStream.batches(None, rollout=3), "batches has no argument 'rollout'; did you mean 'rollouts'?"),
        (lambda: inflight.Scorer(len, timeout=3), "Scorer has no argument 'timeout'; did you mean 'timeout_s'?"),
    ],
)
def test_what_is_refused_and_how(make, message):
    with pytest.raises(TypeError, match=message):
        make()


RECORDS = {"EpisodeEnd", "LossStats", "PackedBatch", "Rollout", "ScoredGroups", "Session", "TeacherScores", "span"}
"""Public names whose objects inflight makes, or that run for each pass."""
PLAIN = (int, float, str, bool)


def plain_parameters():
    """Return (name, parameter) of each public class or function, for parameters of numbers, strings and booleans."""
    found = []
    for name in sorted(set(inflight.__all__) - RECORDS):
        called = getattr(inflight, name)
        if not inspect.isfunction(called) and (not isinstance(called, type) or issubclass(called, Exception)):
            continue
        for parameter in inspect.signature(called).parameters.values():
            kind = parameter.annotation
            if isinstance(kind, str):  # imported for type checkers only
                continue
            parts = get_args(kind) if get_origin(kind) in (Union, UnionType, Literal) else (kind,)
            if all(part in (*PLAIN, NoneType) or isinstance(part, PLAIN) for part in parts):
                found.append(pytest.param(name, parameter.name, id=f"{name}-{parameter.name}"))
    return found


@pytest.mark.parametrize(("name", "parameter"), plain_parameters())
def test_a_value_of_another_type_is_named(name, parameter):
    """Every public class and function names the parameter, whatever else is missing."""
    called, others = getattr(inflight, name), {"model": "tiny"} if name in ("EngineOptions", "launch") else {}
    with pytest.raises(TypeError, match=rf"\b{parameter}\b.* must be .*, got <object object"):
        called(**{**others, parameter: object()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: inflight.pass_at_k_advantages("2"), r"k of pass_at_k_advantages must be an integer, got '2' \(str\)"),
        (lambda: inflight.pass_at_k_advantages(1.5), "k of pass_at_k_advantages must be an integer, got 1.5"),
        (lambda: inflight.Scorer(3), r"Scorer.score must be a function, got 3 \(int\)"),
        (lambda: inflight.Scorer(len, workers="4"), "Scorer.workers must be an integer, got '4'"),
        (lambda: inflight.Scorer(len, retries=3), "Scorer.retries must be a dict or None, got 3"),
        (lambda: inflight.Limits(rates=3), "Limits.rates must be a dict, got 3"),
        (lambda: inflight.Files(directory=3), "Files.directory must be a string or Path, got 3"),
        (lambda: Engine.generate(None, None), "prompts of generate must be several values, such as a list, got None"),
        (
            lambda: inflight.grpo(*[None] * 4, [], None, inflight.GRPOConfig(), loggers=3),
            "loggers of grpo must be several values",
        ),
        (lambda: inflight.GRPOConfig(schedule=7), "GRPOConfig.schedule must be a string or Schedule, got 7"),
        (lambda: inflight.GRPOConfig(staleness=({},)), "staleness must be a tuple of StalenessRule, got"),
        (lambda: inflight.GRPOConfig(sampling=None), "GRPOConfig.sampling must be .*SamplingParams.*, got None"),
    ],
)
def test_places_functions_and_options_are_checked_too(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_name_of_the_package_that_does_not_exist():
    with pytest.raises(AttributeError, match="'lauch'; did you mean 'launch'"):
        inflight.lauch  # noqa: B018
    assert did_you_mean("xyzzy", inflight.__all__) == ""


def test_dir_lists_the_public_names():
    assert set(inflight.__all__) <= set(dir(inflight))
    assert not {"Any", "TYPE_CHECKING", "import_module", "ModuleType"} & set(dir(inflight))
    assert "__version__" in dir(inflight)


def test_checked_structs_are_copied_pickled_and_decoded_as_before():
    params = SamplingParams(n=3, stop=("x",), logit_bias={3: -1})
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert msgspec.structs.replace(params, n=4).n == 4
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    config = inflight.GRPOConfig(steps=3)
    assert pickle.loads(pickle.dumps(config)) == config == copy.copy(config)


def test_numbers_of_numpy_become_those_of_python():
    params = SamplingParams(n=np.int64(3), temperature=np.float32(0.5), stop_token_ids=[1, 2])
    assert (type(params.n), type(params.temperature)) == (int, float)
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams).temperature == 0.5
    given = {"a": [torch.tensor(3), np.array(0.5)], "b": (np.bool_(True), "text"), np.int64(1): {"c": np.arange(2)}}
    plain = with_plain_numbers(given)
    assert plain["b"] == (True, "text")
    assert [type(each) for each in (*plain["a"], *plain["b"], list(plain)[2])] == [int, float, bool, str, int]
    assert plain[1]["c"] is given[1]["c"]  # no number
    bias = {np.int64(5): np.float32(1), 6: 2.0}
    params = SamplingParams(stop_token_ids=(np.int64(5),), logit_bias=bias)
    assert msgspec.json.encode((params.stop_token_ids, params.logit_bias)) == b'[[5],{"5":1.0,"6":2.0}]'


@pytest.mark.parametrize("struct", [SamplingParams, inflight.EngineOptions])
def test_names_of_other_libraries_lead_to_fields(struct):
    assert set(struct.OTHER_NAMES.values()) <= set(struct.__struct_fields__)
    assert not set(struct.OTHER_NAMES) & set(struct.__struct_fields__)


def test_a_decorated_function_keeps_its_signature_and_leads_to_names_that_it_has():
    assert "transport" in inspect.signature(Engine.publisher).parameters
    with pytest.raises(AssertionError):

        @named({"beta": "nothing"})
        def function(weight: int) -> None: ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerOptions(port=99999), "ServerOptions.port must be between 0 and 65535, got 99999"),
        (lambda: ServerOptions(port=-1), "ServerOptions.port must be between 0 and 65535, got -1"),
        (
            lambda: ServerOptions(keep_alive_s=float("nan")),
            "ServerOptions.keep_alive_s must be between 1 and inf, got nan",
        ),
        (lambda: inflight.Teacher("host:8000"), 'a URL such as "http://host:8000", got'),
    ],
)
def test_values_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
