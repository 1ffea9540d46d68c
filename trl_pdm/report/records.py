"""What a run leaves for its report: what the trust region said about each token of a few completions, and settings."""

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
# Stored beside the rows, so that a reader knows which divergence they are of and where it ended
SETTINGS = ("divergence", "divergence_threshold", "divergence_threshold_high", "proximity", "direction")
ASSESSED = ("divergence", "predicted_change", "outside", "keep")
MAX_TOKENS_A_CHARACTER = 4  # the bytes of a UTF-8 character


class TokenRecords:
    """
    Keeps the last training micro-batch's first completions, which are in random order, and writes them when logging.

    Nothing is read from the device before that: what it holds until then are a few rows of `(B, T)` tensors.

    Args:
        args ([`PDMGRPOConfig`]): `log_token_assessments` completions go to `output_dir`, in a folder of their own.
        writes (`bool`): whether this process is the one that writes.
    """

    def __init__(self, args: "PDMGRPOConfig", writes: bool):
        self._args = args
        self._size = args.log_token_assessments if writes else 0
        self._last: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    def tag(self, mode: str, batch: dict[str, Any], rewards: Mapping[str, Sequence[float]], weights: Tensor) -> None:
        """Add each completion's reward to a rollout, before it is shuffled. `rewards` are TRL's, of all processes."""
        if self._size and mode == "train":  # TRL keeps one rollout's; the process that writes comes first in it
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
        """Hold on to a micro-batch in place of the one before. `mask`: the tokens that are trained on."""
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
        """Write what was kept since the last call, one row a token."""
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
        table.attrs = {name: getattr(self._args, name) for name in SETTINGS}
        folder = os.path.join(self._args.output_dir, FOLDER)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"step_{step:06d}.parquet")
        table.to_parquet(path + ".partial", index=False)
        os.replace(path + ".partial", path)  # a crash leaves the old file or the new one, never half of one


def write_settings(args: "PDMGRPOConfig", **others: Any) -> None:
    """Write all fields of `args`, without secrets, and what else tells a run from another, for its report to compare."""
    path = os.path.join(args.output_dir, SETTINGS_FILE)
    os.makedirs(args.output_dir, exist_ok=True)
    with open(path + ".partial", "w", encoding="utf-8") as file:
        json.dump(others | args.to_dict(), file, indent=2, default=str)
    os.replace(path + ".partial", path)


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """
    The text that each token adds to those before it.

    A token alone can decode to something else (a leading space is lost, half a character is none): the tokens before
    it come along. A character's text is that of the token that completes it, the others have none.
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
    """The files of a run's records, by step."""
    files = {file: re.fullmatch(r"step_(\d+)\.parquet", file.name) for file in (run_dir / FOLDER).glob("*")}
    return dict(sorted((int(name[1]), file) for file, name in files.items() if name))
