"""A greedy loop over a decode graph, whatever runtime executes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class GreedyLoop:
    """One row of text, token by token. Of each runtime there is a subclass that runs the graph and keeps the cache.

    Attributes:
        past: Tokens that the cache has.
        room: Tokens that a static cache has room for; 0 for one that grows.
    """

    past = 0
    room = 0

    def __call__(self, prompt: Sequence[int] | np.ndarray, count: int) -> list[int]:
        """The next tokens of a prompt.

        Args:
            prompt: Ids of one row.
            count: How many tokens to make.
        """
        self.start()
        made: list[int] = []
        self.past, fresh = 0, np.asarray(prompt).reshape(1, -1)
        while True:
            logits = self.step(self.arguments(fresh))
            made.append(int(logits[0, -1].argmax()))
            if len(made) == count:
                return made
            self.past += fresh.shape[1]
            fresh = np.array([[made[-1]]])

    def arguments(self, fresh: np.ndarray) -> dict[str, Any]:
        """What a step takes besides the cache; a graph need not have all of it.

        Args:
            fresh: Ids that the cache doesn't have yet, 1 x length.
        """
        count = fresh.shape[1]
        places = np.arange(self.past, self.past + count)
        if self.room:
            mask = (np.arange(self.room) <= places[:, None])[None, None]
        else:
            mask = np.ones((1, self.past + count), np.int64)
        return {
            "input_ids": fresh,
            "attention_mask": mask,
            "position_ids": places[None],
            "logits_to_keep": np.array([count - 1]),
        }

    def start(self) -> None:
        """Begin with an empty cache."""
        raise NotImplementedError

    def step(self, given: dict[str, Any]) -> Any:
        """Run the graph once, and keep the cache.

        Args:
            given: What it takes besides.

        Returns:
            The logits.
        """
        raise NotImplementedError
