"""What a run writes for its report: its settings, and the trust region's assessment of a few completions' tokens."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from ..trust_region import Evidence, TokenAssessment


if TYPE_CHECKING:
    from ..config import PDMGRPOConfig


FOLDER = "token_assessments"
SETTINGS_FILE = "run_settings.json"
# Stored beside the rows: which divergence they hold, and where the trust region ended
SETTINGS = ("divergence", "divergence_threshold", "divergence_threshold_high", "proximity", "direction")
ASSESSED = ("divergence", "predicted_change", "outside", "keep")
MAX_TOKENS_A_CHARACTER = 4  # the bytes of a UTF-8 character


class TokenRecords:
    """
    Records the tokens of a few completions each time the run logs, with what the trust region said about them.

    They are the first completions of the last training micro-batch, which TRL has shuffled. Until they are written,
    their rows of `(B, T)` tensors stay on the device.

    Args:
        args ([`PDMGRPOConfig`]): how many completions (`log_token_assessments`), and the `output_dir` they go to.
        writes (`bool`): whether this process writes. The others record nothing.
    """

    def __init__(self, args: "PDMGRPOConfig", writes: bool):
        self._args = args
        self._size = args.log_token_assessments if writes else 0
        self._last: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def tag(self, mode: str, batch: dict[str, Any], rewards: Mapping[str, Sequence[float]], weights: Tensor) -> None:
        """Add the completions' rewards to the `batch` of a rollout, before TRL shuffles it.

        Args:
            mode (`str`): `"train"` or `"eval"`, as for the other methods. Evaluations are not recorded.
            batch (`dict`): gets `reward`, `(B,)`.
            rewards (`Mapping`): what TRL logs: each reward function's rewards, of the completions of all processes.
            weights (`Tensor`, float): one per reward function.
        """
        if self._size and mode == "train":  # TRL logs one rollout's rewards, those of the process that writes first
            if len(rewards) != len(weights):  # functions of one name, which TRL logs as one
                return
            scores = torch.tensor([list(values)[: len(batch["completion_ids"])] for values in rewards.values()])
            total = (scores.T * weights.to(scores.device)).nansum(1).masked_fill(scores.isnan().all(0), torch.nan)
            batch["reward"] = total.to(batch["completion_ids"].device)

    @torch.no_grad()
    def keep(
        self,
        mode: str,
        batch: dict[str, Any],
        assessment: TokenAssessment,
        evidence: Evidence,
        advantages: Tensor,
        mask: Tensor,
    ) -> None:
        """Keep this micro-batch instead of the last one. `mask` `(B, T)` is true for tokens that are trained on."""
        if not self._size or mode != "train":
            return
        tokens = {
            "in_completion": batch["completion_mask"].bool(),
            "token_id": batch["completion_ids"],
            "trained_on": mask,
            "advantage": advantages.expand(mask.shape),
            "behavior_logprob": evidence.behavior_logps[..., 0],
            "policy_logprob": evidence.policy_logps[..., 0],
        }
        tokens |= {name: getattr(assessment, name) for name in ASSESSED}
        completions = {name: batch[name] for name in ("prompt_ids", "prompt_mask", "reward") if name in batch}
        tokens, completions = (
            {name: values[: self._size].detach().clone() for name, values in part.items()}
            for part in (tokens, completions)
        )
        self._last = tokens, completions

    def write(self, mode: str, step: int, processing_class: Any) -> None:
        """Write the micro-batch that was kept since the last call, if any, to a Parquet file with one row per token."""
        if self._last is None or mode != "train":
            return
        (tokens, completions), self._last = self._last, None
        tokens, completions = ({k: v.cpu() for k, v in part.items()} for part in (tokens, completions))
        inside = tokens.pop("in_completion")
        table = pd.DataFrame(inside.nonzero().numpy(), columns=["completion", "position"])
        table.insert(0, "step", step)
        for name, values in tokens.items():
            table[name] = values[inside].numpy()
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        rows = table.groupby("completion")
        table["text"] = [text for _, ids in rows["token_id"] for text in token_texts(tokenizer, ids.tolist())]
        first = ~table["completion"].duplicated()
        prompts = zip(completions["prompt_ids"], completions["prompt_mask"].bool(), strict=True)
        prompts = pd.Series([tokenizer.decode(ids[real].tolist()) for ids, real in prompts], dtype=object)
        table["prompt"] = table["completion"].map(prompts).where(first, None)
        if "reward" in completions:
            table["reward"] = completions["reward"].numpy()[table["completion"]]
        settings = _in_effect(self._args)
        table.attrs = {name: settings[name] for name in SETTINGS}
        folder = os.path.join(self._args.output_dir, FOLDER)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"step_{step:06d}.parquet")
        table.to_parquet(path + ".partial", index=False)
        os.replace(path + ".partial", path)  # a crash leaves the old file or the new one, never half of one


def write_settings(args: "PDMGRPOConfig", **others: Any) -> None:
    """Write the settings by which a report compares runs: all fields of `args`, without secrets, and `others`."""
    path = os.path.join(args.output_dir, SETTINGS_FILE)
    os.makedirs(args.output_dir, exist_ok=True)
    with open(path + ".partial", "w", encoding="utf-8") as file:
        json.dump(others | _in_effect(args), file, indent=2, default=str)
    os.replace(path + ".partial", path)


def _in_effect(args: "PDMGRPOConfig") -> dict[str, Any]:
    return args.to_dict() | {"divergence_threshold": args.radius}


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """
    The text that each token adds to those before it.

    A token is decoded together with those before it. Alone it can lose its leading space, or be only a part of a
    character. The text of a character of several tokens goes to the last of them; the others get an empty text.
    """
    texts, start, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = (
            tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in (ids[start:done], ids[start:end])
        )
        if now.endswith("\ufffd") and end - done < MAX_TOKENS_A_CHARACTER:
            texts.append("")
        else:
            texts.append(now[len(before) :])
            start, done = done, end
    return texts


def record_files(run_dir: Path) -> dict[int, Path]:
    """The files of a run's token records, in the order of their steps."""
    files = {file: re.fullmatch(r"step_(\d+)\.parquet", file.name) for file in (run_dir / FOLDER).glob("*")}
    return dict(sorted((int(name[1]), file) for file, name in files.items() if name))
