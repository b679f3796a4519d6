"""What the page asks for and what it is told: parameters of requests, clusters and errors as answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from odcluster.errors import UserError
from odcluster.explore.collection import View
from odcluster.explore.curation import Conflict, Edit
from odcluster.explore.guard import Json
from odcluster.explore.snapshot import Floats, Ids, Rows
from odcluster.explore.thumbnails import Picture

MOST_UPLOAD = 50_000_000
"""Bytes of a request's body."""
MOST_PER_PAGE = 500
EXAMPLES = 9
"""Pictures of a cluster in the overview."""


def number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"`{name}` must be a number from 0 on")
    return min(int(text), most)


def paging(request: Request, per_page: int) -> tuple[int, int]:
    return number(request, "page", 0, 10**9), max(1, number(request, "per_page", per_page, MOST_PER_PAGE))


def choice(request: Request, name: str, among: tuple[str, ...]) -> str:
    """One of a few words; the first if none is given."""
    given = request.query_params.get(name, among[0])
    if given not in among:
        raise HTTPException(400, f"`{name}` must be one of {', '.join(dict.fromkeys(among))}")
    return given


async def body(request: Request) -> bytes:
    """What was sent, refused as soon as it is too much."""
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MOST_UPLOAD:
            raise HTTPException(413, f"more than {MOST_UPLOAD // 1_000_000} MB were sent")
    return bytes(received)


def rounded(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None


def displayed(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def described(edit: Edit) -> dict[str, Any]:
    return {"id": edit.id, "time": edit.time, "text": edit.sentence(), "undone": edit.undone}


def shown(picture: Picture) -> Response:
    if picture.refused:
        reason = "".join(c if " " <= c <= "~" else "?" for c in picture.refused)[:200]
        return Response(
            picture.data, media_type=picture.media_type, headers={"X-Refused": reason, "Cache-Control": "no-store"}
        )
    return Response(picture.data, media_type=picture.media_type, headers={"Cache-Control": "private, max-age=3600"})


def in_conflict(request: Request, error: Conflict) -> Response:
    return Json({"error": str(error), "current": error.current}, 409)


def refused(request: Request, error: UserError) -> Response:
    return Json({"error": displayed(str(error))}, 400)


def failed(request: Request, error: HTTPException) -> Response:
    return Json({"error": error.detail}, error.status_code, error.headers)


# --- Clusters ---------------------------------------------------------------------------------------


def card(view: View, changes: Floats, cluster: int) -> dict[str, Any]:
    """What an overview shows of a cluster."""
    change, tightness = float(changes[cluster]), rounded(view.clusters.tightness[cluster])
    return {
        "id": cluster,
        "name": view.name(cluster),
        "size": int(view.clusters.sizes[cluster]),
        "tightness": None if tightness is None else min(max(tightness, 0.0), 1.0),
        "change": None if math.isnan(change) else int(change),
        "reviewed": cluster in view.state.reviewed,
        "merged": view.merged.get(cluster, []),
        "examples": view.clusters.members(cluster)[:EXAMPLES].tolist(),
    }


def chosen_clusters(view: View, changes: Floats, request: Request) -> Ids:
    """The clusters that a request asks for, in its order; equal ones by number, unknown values last."""
    found = view.listed
    show = choice(request, "show", ("all", "named", "unreviewed"))
    names, reviewed = view.state.names, view.state.reviewed
    if show == "named":
        found = found[np.isin(found, list(names))]
    elif show == "unreviewed":
        found = found[~np.isin(found, list(reviewed))]
    if search := " ".join(request.query_params.get("search", "").casefold().split()):
        numbered = search.removeprefix("cluster").removeprefix("#").strip()
        wanted = [cluster for cluster, name in names.items() if search in name.casefold()]
        wanted += [int(numbered)] if numbered.isdecimal() and len(numbered) < 10 else []
        found = found[np.isin(found, wanted)]
    sort = choice(request, "sort", ("size", "tightness", "change", "name", "id"))
    default = "asc" if sort in ("name", "id") else "desc"
    descending = choice(request, "order", (default, "desc", "asc")) == "desc"
    if sort == "name":
        by_name = sorted((names[c].casefold(), c) for c in found.tolist() if c in names)
        called = np.array([c for _, c in (reversed(by_name) if descending else by_name)], np.int64)
        return np.concatenate((called, found[~np.isin(found, called)]))
    values: dict[str, NDArray[Any]] = {
        "size": view.clusters.sizes,
        "tightness": view.clusters.tightness,
        "change": changes,
    }
    keys = (values[sort][found] if sort in values else found).astype(np.float64)
    return found[np.lexsort((found, -keys if descending else keys))]  # nan last either way


def outliers_of(view: View) -> tuple[Ids, Floats]:
    """Images far from their cluster, the farthest first, and how far."""
    from odcluster.explore.oddities import far_from_their_cluster

    found = far_from_their_cluster(view.clusters.similarities, view.clusters.labels)
    return found.ids, np.asarray(found.scores, np.float32)


@dataclass(frozen=True)
class Duplicates:
    """Groups of images that show nearly the same, with their similarity."""

    groups: list[tuple[list[int], float]]
    of_image: dict[int, int]
    """The number of each image's group."""

    def like(self, image: int) -> list[int]:
        """The others of an image's group."""
        ids = self.groups[self.of_image[image]][0] if image in self.of_image else []
        return [other for other in ids[: MOST_PER_PAGE + 1] if other != image]


class UnitRows:
    """Rows of length 1, made block by block as they are looked at, which is also when a stop takes effect."""

    def __init__(self, rows: Rows, poll: Callable[[], None]) -> None:
        self._rows, self._poll = rows, poll

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, which: slice | Ids) -> Floats:
        self._poll()
        return self._rows.unit(which)
