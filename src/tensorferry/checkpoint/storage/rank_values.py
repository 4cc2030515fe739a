"""Values that several ranks save under one name: torch saves those of one rank, and drops those of the others.

Ranks usually save equal values under a name. Where they differ, the values of all ranks but one are lost, which a load
does not show. So each rank describes its plain values and plain tensors, and the descriptions are compared.
"""

from __future__ import annotations

import ctypes
import marshal
import pickle
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tensorferry.base.caller_warnings import warn
from tensorferry.base.reprs import first_of
from tensorferry.transfer.arrays import is_dense

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Of larger tensors only size and dtype are compared: a checksum would read all of them on every rank.
_MAX_NBYTES = 64 << 10
_SHOWN_NAMES = 4
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


class Description(NamedTuple):
    """What is compared: the size of a tensor, None for other values, and a checksum of the rest."""

    size: tuple[int, ...] | None
    checksum: int


def describe(state: Mapping[str, Any]) -> dict[str, Description]:
    """Return descriptions of the plain values and plain tensors of a flat state, by name."""
    found = {}
    for name, value in state.items():
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            content = _content(value)
            found[name] = Description(tuple(value.size()), zlib.crc32(content))
        elif (piece := _piece(value)) is not None:
            found[name] = Description(None, zlib.crc32(piece))
    return found


def _content(tensor: torch.Tensor) -> bytes:
    """Return the dtype of a tensor, and the bytes of one that is small."""
    content = str(tensor.dtype).encode()
    if is_dense(tensor) and tensor.nbytes <= _MAX_NBYTES:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content += ctypes.string_at(plain.data_ptr(), plain.nbytes)
    return content


def checksum(described: Mapping[str, Description]) -> int:
    """Return one checksum of all descriptions."""
    return zlib.crc32(repr(sorted(described.items())).encode(errors="surrogatepass"))


def _piece(value: Any) -> bytes | None:
    """Return bytes that are equal for equal plain values in all processes; None for other values."""
    kind = type(value)
    if kind is torch.Tensor:
        return marshal.dumps([list(value.size()), _content(value)], 2)
    if kind in _SCALARS:
        return marshal.dumps(
            value, 2
        )  # without references, which depend on the identity of objects
    if kind.__module__ == "numpy":
        try:
            return pickle.dumps(value, 4)
        except Exception:
            return None
    if kind not in (list, tuple, set, frozenset, dict):
        return None
    pieces = [_piece(each) for each in (value.items() if kind is dict else value)]
    if any(piece is None for piece in pieces):
        return None
    ordered = pieces if kind in (list, tuple) else sorted(filter(None, pieces))
    return marshal.dumps([kind.__name__, ordered], 2)


def compare(ranks: Iterable[Mapping[str, Description]], whole: Iterable[str] | None = None) -> None:
    """Warn of names under which the ranks save different values.

    Parameters
    ----------
    ranks : iterable of dict
        The results of :func:`describe` of all ranks.
    whole : iterable of str, optional
        The names of tensors that are saved whole; by default all of them are.

    Raises
    ------
    ValueError
        Ranks save tensors of different sizes under one name.
    """
    by_name: dict[str, set[Description]] = {}
    for described in ranks:
        for name, description in described.items():
            by_name.setdefault(name, set()).add(description)
    different = {name: found for name, found in by_name.items() if len(found) > 1}
    if not different:
        return
    remedy = "(remedy: give them names that contain the rank, or save them as DTensor)"
    sizes = {name: {each.size for each in found} - {None} for name, found in different.items()}
    checked = different.keys() & (different if whole is None else whole)
    torn = [
        f"{name!r} {sorted(map(list, sizes[name]))}"  # type: ignore[arg-type]
        for name in sorted(checked)
        if len(sizes[name]) > 1
    ]
    if torn:
        raise ValueError(
            f"ranks save tensors of different sizes under one name: {first_of(torn, _SHOWN_NAMES)} {remedy}"
        )
    names = first_of([*map(repr, sorted(different))], _SHOWN_NAMES)
    warn(
        f"ranks save different values under one name, and only those of one rank are kept: {names} {remedy}"
    )
