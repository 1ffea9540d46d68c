"""Every knob is usable from Python, flags and YAML, documented, and refuses what it cannot mean."""

import logging
import math
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from trl import GRPOConfig, TrlParser

from trl_pdm import PDMGRPOConfig
from trl_pdm.config import RADII


OWN = [f for f in fields(PDMGRPOConfig) if f.name not in {g.name for g in fields(GRPOConfig)}]


def test_defaults():
    config = PDMGRPOConfig(use_cpu=True)
    assert (config.divergence, config.divergence_support, config.divergence_top_k) == ("kl", "topk", 20)
    assert (config.divergence_threshold, config.divergence_threshold_high) == (None, None)
    assert (config.proximity, config.direction, config.tail_estimator) == ("divergence", "predictive", "exact")
    assert config.importance_ratio_max == 20.0


@pytest.mark.parametrize("divergence, radius", [("kl", 0.15), ("reverse_kl", 0.15), ("tv", 0.27)])
def test_the_threshold_follows_the_divergence_until_it_is_set(divergence, radius):
    def bounds(**thresholds):
        region = PDMGRPOConfig(use_cpu=True, divergence=divergence, **thresholds).trust_region
        return region.threshold_low, region.threshold_high

    assert bounds() == (radius, radius)
    assert bounds(divergence_threshold_high=0.5) == (radius, 0.5)
    assert bounds(divergence_threshold=0.4) == (0.4, 0.4)
    assert RADII[divergence] == radius and RADII["tv"] == pytest.approx((RADII["kl"] / 2) ** 0.5, abs=0.005)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "a divergence of 0.15 nats"),
        (dict(divergence="tv", divergence_threshold_high=0.3), "a divergence of 0.27 total variation, 0.3 with a positive advantage"),
        (dict(proximity="ratio", epsilon_high=0.28), "an importance ratio within -0.2 and +0.28 of 1"),
    ],
)  # fmt: skip
def test_where_the_region_ends_in_words(options, words):
    assert PDMGRPOConfig(use_cpu=True, **options).bounds == words


def test_flags_and_yaml(tmp_path):
    (tmp_path / "recipe.yaml").write_text("divergence: tv\ndivergence_threshold: 0.2\nlearning_rate: 3.0e-6\n")
    (config,) = TrlParser(PDMGRPOConfig).parse_args_and_config(
        ["--config", str(tmp_path / "recipe.yaml"), "--direction", "ratio", "--divergence_top_k", "7", "--use_cpu"]
    )
    assert (config.divergence, config.divergence_threshold, config.learning_rate) == ("tv", 0.2, 3e-6)
    assert (config.direction, config.divergence_top_k) == ("ratio", 7)


def test_help_and_docstring_explain_each_field():
    help_text = re.sub(r"\s+", " ", TrlParser(PDMGRPOConfig).format_help())
    described = re.findall(r"^        (\w+) \(`", PDMGRPOConfig.__doc__, re.M)
    assert described == [f.name for f in OWN]
    for f in OWN:
        assert f.metadata["help"] and f"--{f.name}" in help_text
        default = repr(f.default) if not isinstance(f.default, str) else f'"{f.default}"'
        entry = PDMGRPOConfig.__doc__.split(f"        {f.name} (")[1].split("\n")[0]
        assert f.default is None or f"defaults to `{default}`" in entry, entry


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        ("divergence", "js", "one of 'kl', 'tv', 'reverse_kl'"),
        ("divergence_support", "full", "one of 'topk', 'binary'"),
        ("proximity", "kl", "one of 'divergence', 'ratio'"),
        ("direction", "up", "one of 'predictive', 'ratio', 'none'"),
        ("tail_estimator", "zero", "one of 'exact', 'uniform', 'aggregated'"),
        ("divergence_threshold", 0.0, "a positive, finite number"),
        ("divergence_threshold", -0.1, "a positive, finite number"),
        ("divergence_threshold", math.nan, "a positive, finite number"),
        ("divergence_threshold", math.inf, "a positive, finite number"),
        ("divergence_threshold_high", 0.0, "a positive, finite number"),
        ("divergence_top_k", 0, "an integer of at least 1"),
        ("divergence_top_k", 2.5, "an integer of at least 1"),
        ("importance_ratio_max", 0.5, "a finite number of at least 1"),
        ("importance_ratio_max", math.inf, "a finite number of at least 1"),
    ],
)
def test_refusals_name_field_value_and_remedy(name, value, remedy):
    with pytest.raises(ValueError) as error:
        PDMGRPOConfig(use_cpu=True, **{name: value})
    message = str(error.value)
    assert message.startswith(f"`{name}` must be {remedy}") and message.endswith(f"got {value!r}.")


def test_the_second_correction_is_off_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="trl_pdm"):
        config = PDMGRPOConfig(use_cpu=True, use_vllm=True)
    assert config.vllm_importance_sampling_correction is False
    assert "`vllm_importance_sampling_correction` is switched off" in caplog.text


SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    "options, named",
    [
        ({"proximity": "ratio", "loss_type": "cispo"}, "`loss_type='cispo'`"),
        ({"proximity": "ratio", "loss_type": "luspo"}, "`loss_type='luspo'`"),
        ({"proximity": "ratio", "loss_type": "grpo", "delta": 1.5}, "`delta=1.5`"),
        ({"proximity": "ratio", "loss_type": "dapo", **SEQUENCE}, "`importance_sampling_level='sequence'`"),
    ],
)
def test_an_epsilon_of_two_meanings_is_refused(options, named):
    with pytest.raises(ValueError, match=f"`proximity='ratio'` does not go with {named}.*Set"):
        PDMGRPOConfig(use_cpu=True, **options)


@pytest.mark.parametrize("name, value", [("epsilon", -0.1), ("epsilon", math.nan), ("epsilon_high", -0.1)])
def test_an_epsilon_that_bounds_no_region_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a number that is not negative, .*, got {value}"):
        PDMGRPOConfig(use_cpu=True, proximity="ratio", **{name: value})


@pytest.mark.parametrize("loss_type", ["sapo", "vespo", "grpo"])
def test_an_epsilon_of_one_meaning_is_not(loss_type):
    assert PDMGRPOConfig(use_cpu=True, proximity="ratio", loss_type=loss_type).trust_region.threshold_low == 0.2


RATIO = {"proximity": "ratio", "direction": "ratio"}


@pytest.mark.parametrize(
    "options, idle",
    [
        ({"epsilon": 0.1, "epsilon_high": 0.28}, {"epsilon", "epsilon_high"}),
        ({"epsilon_high": 0.28, "loss_type": "sapo"}, {"epsilon_high"}),
        ({"epsilon_high": 0.28, "loss_type": "cispo"}, set()),
        ({"epsilon_high": 0.28, "delta": 1.5}, set()),
        ({"tail_estimator": "uniform", "direction": "ratio"}, {"tail_estimator"}),
        ({"tail_estimator": "uniform", "direction": "none"}, {"tail_estimator"}),
        ({"tail_estimator": "uniform", "divergence_support": "binary"}, {"tail_estimator"}),
        ({"divergence_top_k": 5, "divergence_support": "binary"}, {"divergence_top_k"}),
        ({"divergence_threshold": 0.05, "divergence_threshold_high": 0.1, **RATIO}, {"divergence_threshold", "divergence_threshold_high"}),
        ({"divergence": "tv", "divergence_top_k": 5, **RATIO}, {"divergence", "divergence_top_k"}),
        ({"divergence_support": "binary", "proximity": "ratio", "direction": "none"}, {"divergence_support"}),
        ({"divergence": "tv", "divergence_top_k": 5, "proximity": "ratio"}, set()),
        ({"divergence_threshold": 0.05, "proximity": "ratio"}, {"divergence_threshold"}),
        ({"importance_ratio_max": 5.0, "loss_type": "sapo"}, {"importance_ratio_max"}),
        ({"importance_ratio_max": 5.0, **SEQUENCE}, {"importance_ratio_max"}),
        ({"importance_ratio_max": 5.0}, set()),
        ({"log_realized_alignment": True}, {"log_realized_alignment"}),
        ({"sync_check_steps": 5, "sync_check_threshold": 0.1}, {"sync_check_steps", "sync_check_threshold"}),
        ({"vllm_weight_sync": "full", "vllm_quantization": "fp8"}, {"vllm_weight_sync", "vllm_quantization"}),
        ({"sync_check_threshold": 0.1, "sync_check_steps": 0, "use_vllm": True}, {"sync_check_threshold"}),
        ({"divergence_top_k": 5, "divergence_support": "binary", "sampling_support": "replay", "use_vllm": True}, set()),
        ({}, set()),
    ],
)  # fmt: skip
def test_options_without_effect_are_named_in_one_warning(options, idle, caplog):
    config = PDMGRPOConfig(use_cpu=True, **options)
    assert set(config.without_effect()) == idle
    with caplog.at_level(logging.WARNING, logger="trl_pdm"):
        config.warn_of_options_without_effect()
    warnings = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(warnings) == bool(idle)
    for name in idle:
        assert f"`{name}={getattr(config, name)!r}`, as " in warnings[0]


def test_a_plain_config_with_a_clip_of_its_own_is_told_that_the_mask_replaces_it():
    config = PDMGRPOConfig.from_grpo(GRPOConfig(use_cpu=True, epsilon_high=0.28))
    assert set(config.without_effect()) == {"epsilon_high"}


@pytest.mark.parametrize(
    "options, candidates, sum_sq",
    [
        ({}, 20, True),
        ({"direction": "ratio"}, 20, False),
        ({"divergence_support": "binary"}, 0, False),
        ({"proximity": "ratio", "direction": "ratio"}, 0, False),
        ({"proximity": "ratio", "direction": "ratio", "sampling_support": "replay", "use_vllm": True}, 20, False),
        ({"direction": "ratio", "log_realized_alignment": True}, 20, True),
    ],
)
def test_no_more_is_asked_of_engine_and_head_than_the_mask_reads(options, candidates, sum_sq):
    config = PDMGRPOConfig(use_cpu=True, **options)
    assert (config.num_candidates, config.needs_sum_sq) == (candidates, sum_sq)


def test_a_plain_grpo_config_keeps_what_was_set():
    plain = GRPOConfig(use_cpu=True, generation_batch_size=16, num_generations=4, epsilon_high=0.4, seed=7)
    config = PDMGRPOConfig.from_grpo(plain)
    own = {f.name for f in OWN} | {"vllm_importance_sampling_correction"}
    assert {n: v for n, v in vars(config).items() if n not in own} == {
        n: v for n, v in vars(plain).items() if n not in own
    }
    assert config.divergence == "kl" and isinstance(config, PDMGRPOConfig)
    assert PDMGRPOConfig.from_grpo(config) is config and PDMGRPOConfig.from_grpo(None) is None


def test_other_subclasses_are_refused():
    class MyConfig(GRPOConfig):
        pass

    with pytest.raises(TypeError, match="let `MyConfig` inherit from `PDMGRPOConfig`"):
        PDMGRPOConfig.from_grpo(MyConfig(use_cpu=True))


def test_import_is_light():
    code = "import sys, trl_pdm; print(*{'vllm', 'torch', 'trl', 'bitsandbytes'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_a_support_that_can_never_be_replayed_is_refused():
    """Of `top_k` tokens that survive, more than are asked for; `top_p` may leave fewer."""
    replay = dict(use_cpu=True, use_vllm=True, sampling_support="replay")
    with pytest.raises(ValueError, match=r"`divergence_top_k` must be at least `top_k` \(50\) .*, got 20"):
        PDMGRPOConfig(**replay, top_k=50)
    PDMGRPOConfig(**replay, top_k=20)
    PDMGRPOConfig(**replay, top_k=50, top_p=0.9)
