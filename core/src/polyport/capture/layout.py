"""Which axes of the inputs may vary, as far as names and sizes tell; `probe` then asks the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from polyport.capture.groups import Group, Kind, Layout

#: Kwargs that hold caches, whose tensors are `[batch, heads, past, head_dim]` (or states that only have a batch).
CACHES = ("cache", "past_key_values", "cache_params", "state", "encoder_past_key_values")

#: Kwarg -> what its second kind of axis counts, where "sequence" would mislead a reader.
_READABLE = {
    "input_values": "samples",
    "input_features": "frames",
    "flattened_patches": "patches",
    "past_values": "time",
    "input_points": "points",
    "input": "sequence",  # of a plain layer, such as a language model's head
}

_IMAGE = ("pixel_", "image_", "video_", "aspect_ratio_", "spatial_shapes")
#: What a tower made of images is no image.
_FEATURES = ("_features", "_hidden_states")
#: What attention looks at beside the tokens, `[batch, length, size]`, and its mask.
_ENCODED = ("encoder_hidden_states", "encoder_attention_mask", "cross_attention_states")
_ROWS_ONLY = ("_grid_thw", "_sizes", "spatial_shapes")


def propose(leaves: Mapping[str, torch.Tensor], special: set[int]) -> Layout:
    """Group the axes of the inputs by what they count.

    Args:
        leaves: The input tensors by name.
        special: Token ids that stand for something else (see `placeholders`).
    """
    return _Proposal(leaves, special).layout()


class _Proposal:
    def __init__(self, leaves: Mapping[str, torch.Tensor], special: set[int]) -> None:
        self.leaves = leaves
        self.axes: dict[str, dict[int, tuple[str, ...]]] = {name: {} for name in leaves}
        self.groups: dict[str, Group] = {}
        self.batch = self._batch()
        self.sequence = self._length(
            "input_ids", "inputs_embeds", "encoder_outputs.last_hidden_state", "encoder_outputs.0"
        )
        self.decoder = self._length("decoder_input_ids", "decoder_inputs_embeds")
        # layers with a sliding window may hold less than the others
        pasts = [int(x.shape[2]) for n, x in leaves.items() if _is_past(n, x) and "cross_attention" not in n]
        # of a static cache the size of the buffers says nothing about the tokens in them
        self.buffered = any(n.endswith("cumulative_length") for n in leaves)
        self.pasts = set(pasts)
        # and layers that attend to images hold those
        masked = {
            int(x.shape[-1]) - (self.sequence or 0)
            for n, x in leaves.items()
            if n.startswith("attention_mask")
        }
        self.past = None if self.buffered else max(self.pasts & masked or self.pasts, default=None)
        # a recurrent state takes one token at a time; what a model does with more is another computation
        self.stepwise = self.sequence == 1 and any(
            n.split(".")[0] in CACHES
            and not _is_past(n, x)
            and not n.endswith("cumulative_length")
            and x.dim() > 1
            for n, x in leaves.items()
        )
        text, pixels = leaves.get("input_ids"), [n for n in leaves if n.startswith("pixel_values")]
        # images that take the place of tokens are counted on their own: a row may hold none or several
        self.placed = (
            bool(pixels) and text is not None and any(bool((text == token).any()) for token in special)
        )
        self.tiled = any(name.endswith("_sizes") for name in leaves)
        if self.placed and not self.tiled and any(leaves[name].dim() > 4 for name in pixels):
            self.placed = False  # [batch, images, ...]: a row's images are an axis of their own

    def layout(self) -> Layout:
        for name, leaf in self.leaves.items():
            if leaf.dim() == 0:
                continue
            if name.split(".")[0] in CACHES:
                self._cache(name, leaf)
            elif name.startswith(_IMAGE) and not name.endswith(_FEATURES):
                self._image(name, leaf)
            else:
                self._other(name, leaf)
        return Layout(self.axes, self.groups)

    def _batch(self) -> int:
        first = (
            "input_ids",
            "inputs_embeds",
            "decoder_input_ids",
            "input_features",
            "input_values",
            "pixel_values",
        )
        for name in (*first, *self.leaves):
            leaf = self.leaves.get(name)
            if leaf is not None and leaf.dim() > 0:
                return int(leaf.shape[0])
        return 1

    def _length(self, *names: str) -> int | None:
        for name in names:
            leaf = self.leaves.get(name)
            if leaf is not None and leaf.dim() > 1:
                return int(leaf.shape[1 if leaf.is_floating_point() else -1])
        return None

    def _set(self, leaf: str, dim: int, name: str, kind: Kind, sure: bool = True) -> None:
        size = int(self.leaves[leaf].shape[dim])
        group = self.groups.setdefault(name, Group(name, kind, size, sure))
        if group.size != size:
            name = f"{leaf}_{dim}"
            self.groups[name] = Group(name, kind, size, sure)
        self.axes[leaf][dim] = (name,)

    def _lead(self, leaf: str, other: str) -> None:
        same = self.leaves[leaf].shape[0] == self.batch
        self._set(leaf, 0, "batch" if same else other, "lead")

    def _cache(self, name: str, leaf: torch.Tensor) -> None:
        self._lead(name, f"{name}_0")
        if not _is_past(name, leaf):
            return
        length = int(leaf.shape[2])
        crossed = "cross_attention" in name
        if crossed and length == self.sequence:
            self._set(name, 2, "sequence", "tokens")
        elif self.buffered:
            self._set(name, 2, f"encoder_buffer_{length}" if crossed else "cache_length", "past", sure=False)
        elif crossed:
            self._set(name, 2, "encoder_sequence", "past")
        else:
            self._set(name, 2, "past" if length == self.past else f"past_{length}", "past")

    def _image(self, name: str, leaf: torch.Tensor) -> None:
        rank, masklike = leaf.dim(), not name.startswith("pixel_values")
        if rank == 2 and not masklike:
            self._set(name, 0, "patches", "lead")
            return
        if self.placed:
            self._set(name, 0, "images", "lead")
        else:
            self._lead(name, "images")
        if name.endswith(_ROWS_ONLY) or name.startswith(_ROWS_ONLY):
            return
        if rank == 3 and name in ("pixel_values", "pixel_attention_mask"):
            self._set(name, 1, "patches", "free")
            return
        spatial = name.startswith("pixel_") and rank >= (3 if masklike else 4)
        if spatial:
            self._set(name, rank - 2, "height", "pixels")
            self._set(name, rank - 1, "width", "pixels")
        last = rank if not spatial else rank - 2 if masklike else rank - 3
        for dim in range(1, last):
            if self.tiled or dim == 2:
                label = "tiles"
            else:
                several = "input_ids" in self.leaves or "aspect_ratio_ids" in self.leaves
                label = "images" if several and "video" not in name else "frames"
            self._set(name, dim, label, "free", sure=False)

    def _other(self, name: str, leaf: torch.Tensor) -> None:
        base = name.split(".", maxsplit=1)[0]
        first = 1
        if "grid_thw" in self.leaves:  # a tower that takes the patches of all images in one row
            self._set(name, 0, "images" if base == "grid_thw" else "patches", "lead")
            return
        if base == "patch_attention_mask" and leaf.dim() == 3 and "pixel_values" in self.leaves:
            self._lead(name, f"{name}_0")
            self._set(name, 1, "patch_rows", "pixels")
            self._set(name, 2, "patch_columns", "pixels")
            return
        if base == "logits_to_keep":
            self._set(name, 0, "kept", "tokens")  # positions among the tokens, not rows of the batch
            return
        if leaf.dim() == 1 and base.endswith("position"):
            first = 0  # cache_position has no batch
        elif leaf.dim() == 3 and base.endswith("position_ids") and self._sectioned(leaf):
            self._set(name, 1, "batch", "lead")  # [rope sections, batch, sequence]
            first = 2
        else:
            self._lead(name, f"{name}_0".replace(".", "_"))
        if leaf.dim() == 4 and "mask" in base and (leaf.is_floating_point() or leaf.dtype is torch.bool):
            self._attention(name, base, leaf)
            return
        for dim in range(first, leaf.dim()):
            self._other_axis(name, base, leaf, dim)

    def _other_axis(self, name: str, base: str, leaf: torch.Tensor, dim: int) -> None:
        size = int(leaf.shape[dim])
        label, length = (
            ("decoder_sequence", self.decoder) if base.startswith("decoder_") else ("sequence", self.sequence)
        )
        counted = size == length and (dim == 1 or not leaf.is_floating_point())
        if base in _ENCODED and length is not None:
            if dim == 1:
                self._set(name, dim, "encoder_sequence", "free", sure=False)
        elif (
            self.past is not None
            and "mask" in base
            and dim == leaf.dim() - 1
            and size == self.past + (length or 0)
        ):
            self._total(name, dim, label, size)
        elif base == "cross_attention_mask" and dim > 1:
            self._set(name, dim, "images" if dim == 2 else "tiles", "free", sure=False)
        elif self.buffered and self.decoder is None and name == "attention_mask" and leaf.dim() == 2:
            self._set(name, dim, "total_sequence", "tokens", sure=False)
        elif counted and not self.stepwise:
            self._set(name, dim, label, "tokens")
        elif length is not None and not counted and not leaf.is_floating_point() and dim == 1:
            if leaf.dim() == 3 and base != "bbox":
                self._set(name, dim, "choices", "free", sure=False)
            elif "mask" in base:
                self._set(name, dim, f"{base}_{dim}", "free", sure=False)
        elif length is None and label == "sequence":
            self._free(name, base, leaf, dim)

    def _sectioned(self, positions: torch.Tensor) -> bool:
        """Whether positions of rank 3 have the sections of the rope in front of the batch (and no choices behind it)."""
        ids = self.leaves.get("input_ids")
        return positions.shape[0] != self.batch or (
            positions.shape[1] == self.batch and (ids is None or ids.dim() == 2)
        )

    def _attention(self, name: str, base: str, leaf: torch.Tensor) -> None:
        """A mask of `[batch, heads, queries, keys]`: the keys are what is cached, then the new tokens."""
        decoded = base.startswith("decoder_")
        label, length = ("decoder_sequence", self.decoder) if decoded else ("sequence", self.sequence)
        if length is None:
            return
        queries, keys = leaf.shape[2:]
        if queries == length and not self.stepwise:
            self._set(name, 2, label, "tokens")
        if "row" in base:
            return  # one number for each query
        if keys == length and not self.stepwise and not self.buffered and self._encoded(base) is None:
            self._set(name, 3, label, "tokens")
        elif self.buffered and keys in self.pasts:
            self._set(name, 3, "cache_length", "past", sure=False)
        elif base.startswith("cross") and keys in self.pasts:
            self._set(name, 3, "past" if keys == self.past else f"past_{keys}", "past")
        elif keys == self._encoded(base):
            self._set(name, 3, "encoder_sequence", "free", sure=False)
        elif not self.buffered and keys - length in self.pasts:
            self._total(name, 3, label, int(keys), int(keys - length))

    def _encoded(self, mask: str) -> int | None:
        """How long what a mask over something encoded covers is; None for a mask over the tokens themselves."""
        states = {
            "cross_attention_mask": "cross_attention_states",
            "encoder_attention_mask": "encoder_hidden_states",
        }
        leaf = self.leaves.get(states.get(mask, ""))
        return None if leaf is None else int(leaf.shape[1])

    def _total(self, name: str, dim: int, sequence: str, size: int, past: int | None = None) -> None:
        past = self.past or 0 if past is None else past
        cached = "past" if past == (self.past or 0) else f"past_{past}"
        if self.stepwise:
            self.groups.setdefault(sequence, Group(sequence, "fixed", size - past))
        self.groups.setdefault(sequence, Group(sequence, "tokens", size - past))
        self.groups.setdefault(cached, Group(cached, "past", past))
        self.axes[name][dim] = (cached, sequence)

    def _free(self, name: str, base: str, leaf: torch.Tensor, dim: int) -> None:
        """An axis of something that is no text: joined with axes of its size among the like, asked one by one."""
        size = int(leaf.shape[dim])
        for group in self.groups.values():
            if group.kind == "free" and group.size == size and name not in self._members(group.name):
                self._set(name, dim, group.name, "free", sure=False)
                return
        label = _READABLE.get(base, f"{base}_{dim}")
        if label in self.groups:
            label = f"{base}_{dim}"
        self._set(name, dim, label, "free", sure=False)

    def _members(self, group: str) -> Iterator[str]:
        return (leaf for leaf, dims in self.axes.items() for terms in dims.values() if group in terms)


def _is_past(name: str, leaf: torch.Tensor) -> bool:
    """Whether a leaf of a cache grows with the tokens: keys and values do, the states of recurrent layers don't."""
    path = name.split(".")
    legacy = all(part.isdigit() for part in path[1:])  # a tuple of tuples
    return path[0] in CACHES and leaf.dim() == 4 and (path[-1] in ("keys", "values") or legacy)
