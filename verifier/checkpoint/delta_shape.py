"""The sizes of a model's gated delta nets, and by which names their weights are stored."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Gated delta nets. Value heads share key heads in equal numbers; `key_dim` and `value_dim` are
    of one head.

    Attributes:
        kernel_size: inputs that the convolution of one output sees.
        takes_turns: whether value heads share key heads by turns (0, 1, 2, 0, 1, 2), as GGUF has
            them; else those of a key head are neighbours (0, 0, 1, 1, 2, 2).
        inputs: names of the weights of queries, keys, values, gates, and each head's two numbers.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    takes_turns: bool = False
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    @property
    def num_channels(self) -> int:
        """Of the convolution: all queries', keys' and values'."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def input_sizes(self) -> list[int]:
        """Outputs of each of `inputs`."""
        values = self.num_value_heads * self.value_dim
        sizes = {
            "in_proj_qkvz": self.num_channels + values,
            "in_proj_qkv": self.num_channels,
            "in_proj_z": values,
            "in_proj_ba": 2 * self.num_value_heads,
            "in_proj_b": self.num_value_heads,
            "in_proj_a": self.num_value_heads,
        }
        return [sizes[name] for name in self.inputs]

    def value_head(self, key_head: int, place: int) -> int:
        """The number of a key head's value head, `place` among them."""
        if self.takes_turns:
            return place * self.num_key_heads + key_head
        return key_head * (self.num_value_heads // self.num_key_heads) + place
