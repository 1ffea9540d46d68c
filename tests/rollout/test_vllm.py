"""A real vLLM, in this process and as a server: what it is asked, and that what it answers is the policy that sampled.

What must come out is the whole vocabulary's log-softmax of the very weights that the engine was given.
"""

import json
import logging
import math
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from tests.helpers import tiny
from tests.helpers.processes import free_port, in_two_processes
from tests.helpers.references import reference_logps, reference_model, unpadded
from tests.helpers.trainers import run
from tests.rollout.helpers import ENGINE, ENGINE_TOP_K, generate, generate_on, make_trainer, sync
from trl_pdm.rollout import TopKVLLMGeneration


ENGINE_NOISE = 0.02  # mean, in nats: a bf16 engine against a float32 trainer


# ---- vLLM in this process: one engine for all of these tests


def assert_is_the_engines_policy(trainer, batch):
    """The engine got the trainer's weights and returned its top K, each beside the token it was sampled among."""
    model = reference_model(trainer)
    errors, outside, unlikely = [], 0, 0
    for prompt_ids, completion_ids, ids, logps in unpadded(batch):
        full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)
        assert ids[:, 0].tolist() == completion_ids
        for t, token in enumerate(completion_ids):
            listed = ids[t][ids[t] >= 0].long()
            assert len(set(listed.tolist())) == len(listed)
            errors += (logps[t][ids[t] >= 0] - full[t][listed]).abs().tolist()
            left_out = full[t].clone()
            left_out[listed] = -math.inf
            # Top K but for noise: nothing that was left out is more probable than a candidate
            assert left_out.max() <= full[t][listed[1:]].min() + 0.3
            outside += len(listed) == ENGINE_TOP_K + 1
            unlikely += token != full[t].argmax()
            assert len(listed) in (ENGINE_TOP_K, ENGINE_TOP_K + 1)
    assert len(errors) > 500 and np.mean(errors) < ENGINE_NOISE
    assert unlikely > 10, "tokens other than the most probable one must be sampled too"
    return outside


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_batch_is_the_policy_that_sampled(engine):
    batch = generate_on(engine)
    lengths = batch["completion_mask"].sum(1)
    assert len(set(lengths.tolist())) > 1, "completions of several lengths"
    assert batch["behavior_topk_ids"].shape == (12, lengths.max(), ENGINE_TOP_K + 1)
    assert batch["behavior_topk_ids"].dtype == torch.int32 and batch["behavior_topk_logps"].dtype == torch.float32
    padding = batch["completion_mask"] == 0
    assert (batch["behavior_topk_ids"][padding] == -1).all()
    assert batch["behavior_topk_logps"][padding][:, 0].isnan().all()
    for group in batch["prompt_ids"].view(4, 3, -1):  # generations of one prompt stay together
        assert (group == group[0]).all()
    assert len({tuple(row) for row in batch["completion_ids"].tolist()}) > 6
    torch.testing.assert_close(
        batch["sampling_per_token_logps"][~padding], batch["behavior_topk_logps"][..., 0][~padding]
    )
    assert assert_is_the_engines_policy(engine, batch) > 0, "some tokens must be sampled from outside the top K"


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_batch_stays_aligned_when_trl_shuffles_and_splits(on_engine):
    trainer = on_engine()
    trainer.model.train()
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset.select(range(4)) for _ in range(3)]
    trainer._prepare_inputs(rows)
    assert len(trainer._buffered_inputs) == 2
    for batch in trainer._buffered_inputs:
        assert batch["behavior_topk_ids"].shape[0] == 6
        assert_is_the_engines_policy(trainer, batch)


@pytest.mark.vllm
@pytest.mark.slow
def test_rollout_func_that_uses_the_trainers_engine(on_engine):
    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        _, completion_ids, logprobs, _ = trainer.vllm_generation.generate(prompt_ids, None, 3)
        # Two turns, with a token of the environment between them
        again = [p + c + [5] for p, c in zip(prompt_ids, completion_ids, strict=True)]
        _, more_ids, more_logprobs, _ = trainer.vllm_generation.generate(again, None, 1)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a + [5] + b for a, b in zip(completion_ids, more_ids, strict=True)],
            "logprobs": [
                [lp[0] for lp in a] + [0.0] + [lp[0] for lp in b] for a, b in zip(logprobs, more_logprobs, strict=True)
            ],
            "env_mask": [[1] * len(a) + [0] + [1] * len(b) for a, b in zip(completion_ids, more_ids, strict=True)],
        }

    trainer = on_engine(rollout)
    trainer._score_behavior = lambda batch: pytest.fail("every sampled token has its candidates")
    batch = generate_on(trainer)
    model = reference_model(trainer)
    errors = []
    for (prompt_ids, completion_ids, ids, logps), mask in zip(unpadded(batch), batch["tool_mask"], strict=True):
        full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)
        for t, token in enumerate(completion_ids):
            if mask[t] == 0:
                assert token == 5 and (ids[t] == -1).all()
                continue
            filled = ids[t] >= 0
            assert ids[t, 0] == token and filled.sum() >= ENGINE_TOP_K
            errors += (logps[t][filled] - full[t][ids[t][filled].long()]).abs().tolist()
    assert np.mean(errors) < ENGINE_NOISE


def watch_generation(trainer, monkeypatch):
    """What the engine is asked and what it answers."""
    llm, calls = trainer.vllm_generation.llm, []
    generate = llm.generate

    def watched(*args, sampling_params, **kwargs):
        outputs = generate(*args, sampling_params=sampling_params, **kwargs)
        calls.append((sampling_params, [completion for output in outputs for completion in output.outputs]))
        return outputs

    monkeypatch.setattr(llm, "generate", watched)
    return calls


@pytest.mark.vllm
@pytest.mark.slow
def test_nothing_is_detokenized_without_stop_strings(on_engine, monkeypatch):
    trainer = on_engine(generation_kwargs={"flat_logprobs": False, "seed": 3})
    calls = watch_generation(trainer, monkeypatch)
    generate_on(trainer)
    ((params, completions),) = calls
    assert params.flat_logprobs and not params.detokenize and params.logprobs == ENGINE_TOP_K and params.seed == 3
    assert {completion.text for completion in completions} == {""}
    assert {text for completion in completions for text in completion.logprobs.decoded_tokens} == {None}


@pytest.mark.vllm
@pytest.mark.slow
def test_stop_strings(on_engine, monkeypatch):
    stop = list("0123456789abcdefg")
    trainer = on_engine(generation_kwargs={"stop": stop})
    calls = watch_generation(trainer, monkeypatch)
    batch = generate_on(trainer)
    assert calls[0][0].detokenize
    stopped = 0
    for _, completion_ids, ids, _ in unpadded(batch):
        text = trainer.processing_class.decode(completion_ids)
        assert not set(text[:-1]) & set(stop), "generation goes on after a stop string"
        stopped += text[-1] in stop
        assert ids[:, 0].tolist() == completion_ids
    assert stopped


@pytest.mark.vllm
@pytest.mark.slow
def test_what_is_asked_is_decided_at_each_request(on_engine, monkeypatch):
    """Stop strings set later get their text, and a dictionary put in place of the first one loses nothing."""
    trainer = on_engine()
    calls, generation = watch_generation(trainer, monkeypatch), trainer.vllm_generation
    generation.generation_kwargs["stop"] = list("0123456789abcdefg")
    generate_on(trainer)
    generation.generation_kwargs = {"seed": 3, "stop_token_ids": [7]}
    generate_on(trainer)
    generation.generation_kwargs = {"ignore_eos": True}
    generate_on(trainer)
    generation.generation_kwargs = {"top_k": 3}
    with pytest.raises(ValueError, match=r"`generation_kwargs` sets `top_k` to 3, of which the loss would not know"):
        generate_on(trainer)
    with_stop, replaced, without_end = (params for params, _ in calls)
    assert with_stop.detokenize and set(with_stop.stop_token_ids) == set(trainer.eos_token_ids)
    assert replaced.flat_logprobs and not replaced.detokenize and replaced.seed == 3 and not replaced.stop
    assert set(replaced.stop_token_ids) == {7, *trainer.eos_token_ids}
    assert not without_end.stop_token_ids and {len(completion.token_ids) for completion in calls[-1][1]} == {12}


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_ends_where_the_trainer_does(engine, on_engine):
    """Ends that only the trainer's memory knows, and one that only the checkpoint knows."""
    tokenizer, of_checkpoint = tiny.tokenizer(), tiny.tokenizer().eos_token_id
    tokenizer.eos_token = "1"
    model = tiny.model(len(tokenizer), seed=5)
    ends = set(tokenizer.convert_tokens_to_ids(list("12345678")))
    model.generation_config.eos_token_id = sorted(ends)[1:]
    model.name_or_path = engine.model.name_or_path  # what the engine was loaded from
    trainer = on_engine(model=model, processing_class=tokenizer)
    batches = [generate_on(trainer) for _ in range(8)]
    completions = [ids for batch in batches for _, ids, *_ in unpadded(batch)]
    assert not any(ends & set(ids[:-1]) for ids in completions), "the engine samples past an end"
    ended = [ids[-1] in ends for ids in completions]
    assert 10 < sum(ended) < len(ended)
    assert all(len(ids) == 12 for ids, by_an_end in zip(completions, ended, strict=True) if not by_an_end)
    assert any(of_checkpoint in ids[:-1] for ids in completions), "of the checkpoint alone, it ends nothing"
    clipped = [np.mean([not end for end in ended[i : i + 12]]) for i in range(0, len(ended), 12)]
    assert trainer._metrics["train"]["completions/clipped_ratio"] == pytest.approx(clipped)


@pytest.mark.vllm
@pytest.mark.slow
def test_settings_of_the_live_trainer_reach_the_loss_or_are_refused(on_engine):
    trainer = on_engine(max_steps=1, sync_check_steps=0)
    for owner, name, value, message in [
        (trainer, "top_p", 0.5, r"`trainer\.top_p` was set to 0\.5 .* vLLM samples with 1\.0\. Set the field `top_p`"),
        (trainer, "temperature", 0.5, r"`trainer\.temperature` was set to 0\.5 .* vLLM samples with 0\.8"),
        (trainer.vllm_generation, "temperature", 0.5, r"`temperature` of .* was set to 0\.5 .* built for 0\.8"),
    ]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(ValueError, match=message):
            generate_on(trainer)
        setattr(owner, name, before)
    trainer.vllm_generation.top_k = 5  # known to be a truncation from then on
    log = run(trainer)[0]
    assert log["trust_region/support_unknown"] == 0 and log["trust_region/log_surviving_mass"] < 0


@pytest.mark.vllm
@pytest.mark.slow
def test_an_empty_prompt_of_a_stream_is_refused_by_its_row(on_engine):
    with pytest.raises(ValueError, match="Prompt 1 of a rollout holds no token"):
        on_engine().vllm_generation.generate([[5, 6], []], None, 1)


class Truncating:
    """A rollout function that samples from the trainer's own model, truncated to its 5 most probable tokens."""

    def __call__(self, prompts, trainer):
        model, output = reference_model(trainer), []
        for prompt in prompts:
            prompt_ids = trainer.processing_class(prompt)["input_ids"]
            row = dict(prompt_ids=prompt_ids, completion_ids=[], logprobs=[], topk_token_ids=[], topk_logprobs=[])
            for _ in range(6):
                ids = [*row["completion_ids"], 0]
                top = reference_logps(model, prompt_ids, ids, trainer.temperature)[-1].topk(5)
                logps, token = top.values.log_softmax(-1), torch.multinomial(top.values.softmax(-1), 1).item()
                row["completion_ids"].append(top.indices[token].item())
                row["logprobs"].append(logps[token].item())
                row["topk_token_ids"].append(top.indices.tolist())
                row["topk_logprobs"].append(logps.tolist())
            output.append(row)
        return {name: [row[name] for row in output] for name in output[0]}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("support", ["full", "replay"])
def test_truncated_candidates_of_a_rollout_function_are_replayed(on_engine, support):
    """The policy that sampled is the trained one over five tokens: replayed, every ratio on policy is 1."""
    log = run(on_engine(Truncating(), max_steps=1, sampling_support=support))[0]
    if support == "replay":
        assert log["importance_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert log["trust_region/divergence_max"] < 1e-4 and log["trust_region/support_unknown"] == 0
    else:
        assert log["importance_ratio/mean"] < 0.95


@pytest.mark.vllm
@pytest.mark.slow
def test_support_that_cannot_be_replayed_is_told_once(on_engine, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_pdm"):
        logs = run(on_engine(top_p=0.999, divergence_top_k=2, sampling_support="replay", max_steps=2))
    assert [log["trust_region/support_unknown"] > 0.5 for log in logs[:2]] == [True, True]
    said = [record.message for record in caplog.records if "`sampling_support='replay'` left" in record.message]
    assert len(said) == 1 and f"left {logs[0]['trust_region/support_unknown']:.0%} of the tokens" in said[0]


@pytest.mark.vllm
@pytest.mark.slow
def test_structured_outputs(on_engine):
    trainer = on_engine(vllm_structured_outputs_regex="[0-9]{3}")
    batch = generate_on(trainer)
    model = reference_model(trainer)
    digits = torch.tensor(trainer.processing_class("0123456789")["input_ids"])
    for prompt_ids, completion_ids, ids, logps in unpadded(batch):
        text = trainer.processing_class.decode(completion_ids, skip_special_tokens=True)
        assert len(text) == 3 and text.isdigit()
        assert ids[:, 0].tolist() == completion_ids
        # The policy that samples is the model's, restricted to what the expression allows
        full = reference_logps(model, prompt_ids, completion_ids, trainer.temperature)[:3, digits]
        allowed = full.log_softmax(-1)
        for t in range(3):
            finite = logps[t] > -1e4
            assert set(ids[t][finite & (ids[t] >= 0)].tolist()) == set(digits.tolist())
            for i, lp in zip(ids[t][finite].tolist(), logps[t][finite].tolist(), strict=True):
                if i >= 0:
                    assert lp == pytest.approx(allowed[t][digits.tolist().index(i)].item(), abs=0.1)


@pytest.mark.vllm
@pytest.mark.slow
def test_nucleus_sampling_leaves_candidates_without_probability(on_engine):
    trainer = on_engine(top_p=0.5)
    batch = generate_on(trainer)
    known = batch["completion_mask"].bool()
    logps = batch["behavior_topk_logps"][known]
    valid = batch["behavior_topk_ids"][known] >= 0
    assert logps[:, 0].isfinite().all() and (logps[valid] == -math.inf).any()
    mass = torch.where(valid, logps, -math.inf).exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=0.01)


@pytest.mark.vllm
@pytest.mark.slow
def test_training_on_the_engines_rollouts(on_engine):
    trainer = on_engine(max_steps=4, learning_rate=3e-3, divergence_threshold=0.02)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "trust_region/divergence_mean" in log]
    assert len(logs) == 4
    for log in logs:
        assert log["trust_region/unscored"] == 0
        assert 0.9 < log["trust_region/topk_mass_behavior"] <= 1.001
    on_policy, off_policy = logs[0::2], logs[1::2]
    for log in on_policy:  # the engine's noise is all that sets the two policies apart
        assert log["importance_ratio/mean"] == pytest.approx(1, abs=0.03)
        assert log["trust_region/divergence_mean"] < 0.005
    assert max(log["trust_region/divergence_max"] for log in off_policy) > 0.02


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_users_number_of_logprobs_is_refused(mode):
    with pytest.raises(ValueError, match=r"`generation_kwargs` sets `logprobs` to 3. .* here 20. `divergence_top_k`"):
        TopKVLLMGeneration(num_candidates=20, mode=mode, generation_kwargs={"logprobs": 3})


# ---- A vLLM server


class StandInServer:
    """A stand-in for `vllm serve`, on the loopback interface: what TRL's `VLLMClient` asks, in the server's format.

    The real one is tested once, below, and slow to start. This one samples from a model here, and is made to show what a
    real answer may hold: a sampled token that is not the most probable, K or K+1 entries a position, and NaN.
    """

    def __init__(self, top_k, max_logprobs=20, logprobs_mode="processed_logprobs"):
        self.model = tiny.model(len(tiny.tokenizer()), seed=5).eval()
        self.info = {
            "model_config": {
                "max_logprobs": max_logprobs,
                "logprobs_mode": logprobs_mode,
                "dtype": "torch.bfloat16",  # as vLLM writes it
                "quantization": None,
            },
            "weight_transfer_config": {"backend": "nccl"},
        }
        self.requests, self.nan_at = [], (1, 2)
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def reply(self, answer):
                body = json.dumps(answer).encode()  # NaN as the literal that TRL's client reads
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                path = self.path.split("?")[0]
                models = {"data": [{"id": "tiny"}]}
                self.reply({"/health": {}, "/v1/models": models, "/server_info": {"vllm_config": stand_in.info}}[path])

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                self.reply(stand_in.complete(request) if self.path == "/v1/completions" else {"success": True})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def complete(self, request):
        from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionResponseChoice

        self.requests.append(request)
        assert request["return_token_ids"] and request["return_tokens_as_token_ids"]
        choices = []
        for prompt in request["prompt"]:
            for _ in range(request["n"]):
                index = len(choices)
                token_ids, logprobs, tops = [], [], []
                for t in range(2 + index % 3):
                    full = reference_logps(self.model, prompt, [*token_ids, 0], request["temperature"])[-1]
                    token = int(full.argsort(descending=True)[(index + t) % 9])  # of any rank, 0 included
                    top = full.topk(request["logprobs"]).indices.tolist()
                    lp = math.nan if (index, t) == self.nan_at else full[token].item()
                    entries = {f"token_id:{token}": lp}  # as the real server: the sampled one, then the top K
                    entries |= {f"token_id:{i}": full[i].item() for i in top if i != token}
                    token_ids.append(token)
                    logprobs.append(lp)
                    tops.append(entries)
                content = CompletionLogProbs(
                    text_offset=[0] * len(token_ids),
                    token_logprobs=logprobs,
                    tokens=[f"token_id:{i}" for i in token_ids],
                    top_logprobs=tops,
                )
                choice = CompletionResponseChoice(
                    index=index, text="", logprobs=content, token_ids=token_ids, prompt_token_ids=prompt
                )
                choices.append(choice.model_dump())
        return {"choices": choices}


@pytest.fixture
def without_nccl(monkeypatch):
    """The two calls of TRL's client that need NCCL do nothing: no weights are sent."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda self, metadata, params: list(params))


@pytest.fixture
def stand_in(without_nccl):
    servers = []

    def start(**kwargs):
        servers.append(StandInServer(**kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def server_trainer(tmp_path, url, **args):
    server = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
    return make_trainer(tmp_path, **dict(sync_check_steps=0) | args | server)  # no check: no weights are sent


@pytest.mark.vllm
@pytest.mark.parametrize("top_k", [1, 6])
def test_server_answers(tmp_path, stand_in, top_k):
    server = stand_in(top_k=top_k)
    trainer = server_trainer(tmp_path, server.url, divergence_top_k=top_k, temperature=0.7, max_steps=2)
    batch = generate(trainer)
    assert [request["logprobs"] for request in server.requests] == [top_k]
    assert [request["stop_token_ids"] for request in server.requests] == [sorted(trainer.eos_token_ids)]
    inside, unlikely = set(), 0
    for row, (prompt_ids, completion_ids, ids, logps) in enumerate(unpadded(batch)):
        full = reference_logps(server.model, prompt_ids, completion_ids, 0.7)
        assert len(completion_ids) == 2 + row % 3
        for t, token in enumerate(completion_ids):
            top = full[t].topk(top_k).indices.tolist()
            inside.add(token in top)
            unlikely += token != top[0]
            filled = ids[t] >= 0
            assert ids[t, 0] == token
            if (row, t) == server.nan_at:
                assert logps[t, 0].isnan()
                filled[0] = False
            assert set(ids[t].tolist()) - {-1} == {token, *top}
            torch.testing.assert_close(logps[t][filled], full[t][ids[t][filled].long()], rtol=1e-4, atol=1e-5)
    assert inside == {True, False} and unlikely > 5
    trainer.train()
    unscored = [log["trust_region/unscored"] for log in trainer.state.log_history if "trust_region/unscored" in log]
    assert len(unscored) == 2 and sum(unscored) > 0


@pytest.mark.vllm
def test_server_that_returns_too_few_logprobs(tmp_path, stand_in):
    server = stand_in(top_k=21, max_logprobs=20)
    with pytest.raises(ValueError, match=r"`divergence_top_k` is 21, .* at most 20 .* `--max-logprobs 21`"):
        server_trainer(tmp_path, server.url, divergence_top_k=21)
    server_trainer(tmp_path, server.url, divergence_top_k=20)
    server_trainer(tmp_path, stand_in(top_k=41, max_logprobs=-1).url, divergence_top_k=41)  # no limit


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_server_whose_logprobs_are_not_the_samplers(tmp_path, stand_in, caplog, mode):
    with caplog.at_level(logging.WARNING, logger="trl_pdm"):
        server_trainer(tmp_path, stand_in(top_k=6, logprobs_mode=mode).url)
    assert ("Restart it with `--logprobs-mode processed_logprobs`" in caplog.text) == (mode == "raw_logprobs")


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_server(tmp_path, without_nccl):
    """vLLM's own, on the CPU, with the weights that the trainer starts from: all but the weight transfer is real."""
    model, port = tiny.save(tmp_path / "model"), free_port()
    options = f"--host 127.0.0.1 --port {port} --max-logprobs {ENGINE_TOP_K} --logprobs-mode processed_logprobs"
    options += " --max-model-len 64 --max-num-seqs 16 --enforce-eager"
    environment = dict(os.environ, VLLM_SERVER_DEV_MODE="1")
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's worker in the engine's process
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a colocated engine's, from other tests
        environment.pop(name, None)
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options.split()],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        trainer = server_trainer(tmp_path, url, **ENGINE | dict(model=model, sync_check_steps=1, max_steps=1))
        assert_is_the_engines_policy(trainer, generate_on(trainer))
        trainer.train()
    finally:
        server.terminate()
        server.wait()


# ---- Several processes


def share_an_engine(rank, tmp_path, model):
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    trainer = make_trainer(tmp_path, model=model, **ENGINE, vllm_tensor_parallel_size=2)
    with torch.no_grad():
        torch.manual_seed(3)  # the same weights in both
        for parameter in trainer.model.parameters():
            parameter.add_(parameter.std() * 0.3 * torch.randn_like(parameter))
    assert_is_the_engines_policy(trainer, generate_on(sync(trainer)))


@pytest.mark.vllm
@pytest.mark.slow
def test_tensor_parallel_engine(tmp_path):
    in_two_processes(share_an_engine, tmp_path, tiny.save(tmp_path / "model"))
