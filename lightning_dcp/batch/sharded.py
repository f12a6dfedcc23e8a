"""What a step sees with sharded outputs: one rank's tokens of a pack."""

from __future__ import annotations

from typing import Any

from lightning_dcp.errors import BatchError


class ShardedBatch(dict[str, Any]):
    """The fields of a batch cut down to one rank's tokens, each ``[1, T_local, ...]``; also read as attributes.

    ``labels`` are those of these tokens, ``shift_labels`` the labels of the tokens that follow them in their samples,
    wherever these lie: labels cannot be shifted here. Fields of samples are left out, as a rank holds parts of samples.

    Args:
        fields: the fields.
        left_out: fields of the whole batch that are not here, for errors.
    """

    def __init__(self, fields: dict[str, Any], left_out: tuple[str, ...] = ()) -> None:
        super().__init__(fields)
        self._left_out = left_out

    def __missing__(self, name: str) -> Any:
        self._refuse_left_out(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._refuse_left_out(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict; a field that is left out is an error here, too."""
        self._refuse_left_out(name)
        return super().get(name, default)

    def _refuse_left_out(self, name: object) -> None:
        if name in self._left_out:
            raise BatchError(
                f"batch[{name!r}] holds no entry a token, and a step with sharded outputs sees parts of samples: use "
                'outputs="gathered"'
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a batch with sharded outputs has no {name!r}; it has {sorted(self)}") from None
