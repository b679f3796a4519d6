"""The web app around a collection: JSON and pictures for the page in app/, for one person on one machine.

Promises: images are asked for by number only, so no name or path from outside reaches the file system; what takes long
runs beside (`beside.py`), and the answer meanwhile is 202; what cannot be is refused with a sentence. Who may ask is
decided by `guard.py`; what is shown comes from `collection.py`, what is changed goes to `curation.py`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from odcluster.errors import ImageRefused, UserError
from odcluster.explore import maps
from odcluster.explore.answers import (
    MOST_PER_PAGE,
    Duplicates,
    UnitRows,
    body,
    card,
    choice,
    chosen_clusters,
    described,
    displayed,
    failed,
    in_conflict,
    number,
    outliers_of,
    paging,
    refused,
    rounded,
    shown,
)
from odcluster.explore.beside import Beside
from odcluster.explore.collection import Collection, View
from odcluster.explore.curation import Conflict, Edit
from odcluster.explore.guard import Guard, Json
from odcluster.explore.history import spread
from odcluster.explore.snapshot import Floats, Ids
from odcluster.explore.thumbnails import SIZES, Thumbnails

PAGE = Path(__file__).with_name("app")
NEAREST = 8


class Server:
    """The answers. One per run; `app` is what a web server runs, `stop` ends what goes on beside."""

    def __init__(self, collection: Collection, token: str) -> None:
        self.collection = collection
        self.thumbnails = Thumbnails(collection.source, collection.directory / "thumbnails.sqlite")
        self.beside = Beside()
        self._processes: list[Popen[bytes]] = []
        self._mapping = threading.Lock()
        self._pca: tuple[str, maps.Map] | None = None
        routes = [
            Route("/", self.page),
            Mount("/app", StaticFiles(directory=PAGE, check_dir=False)),
            Route("/api/run", self.run),
            Route("/api/clusters", self.clusters),
            Route("/api/clusters/{id:int}", self.cluster),
            Route("/api/images/{id:int}", self.image),
            Route("/api/images/{id:int}/similar", self.similar),
            Route("/api/similar", self.similar_to_upload, methods=["POST"]),
            Route("/thumb/{id:int}", self.thumb),
            Route("/image/{id:int}", self.full),
            Route("/api/map", self.map),
            Route("/api/training", self.training),
            Route("/api/oddities", self.oddities),
            Route("/api/edits", self.edits),
            Route("/api/edits", self.edit, methods=["POST"]),
            Route("/api/undo", self.undo, methods=["POST"]),
            Route("/api/redo", self.redo, methods=["POST"]),
        ]
        answers: Mapping[Any, Any] = {Conflict: in_conflict, UserError: refused, HTTPException: failed}
        self.app: ASGIApp = Guard(Starlette(routes=routes, exception_handlers=answers), token)

    def stop(self) -> None:
        for process in list(self._processes):
            process.kill()
        self.beside.stop()
        self.thumbnails.close()
        self.collection.curation.close()

    # --- What there is ------------------------------------------------------------------------------

    def page(self, request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    def run(self, request: Request) -> Response:
        collection = self.collection
        collection.refresh()
        view, status = collection.view(), collection.status()
        has_features = view.snapshot.rows is not None
        return Json(
            {
                "name": displayed(os.path.basename(os.path.abspath(collection.run.path))),
                "method": collection.config.method,
                "images": len(collection),
                "clusters": len(view.listed),
                "state": status.state,
                "step": status.step,
                "total_steps": status.total_steps,
                "version": view.version,
                "has_features": has_features,
                "maps": maps.kinds() if has_features else [],
                "edits": collection.curation.count(),
                "reviewed": len(view.state.reviewed),
                "notes": [displayed(note) for note in collection.notes],
            }
        )

    def clusters(self, request: Request) -> Response:
        view = self.collection.view()
        changes = self.collection.changes(view)
        found = chosen_clusters(view, changes, request)
        page, per_page = paging(request, 60)
        cards = [card(view, changes, cluster) for cluster in found[page * per_page : (page + 1) * per_page].tolist()]
        return Json({"total": len(found), "page": page, "clusters": cards})

    def cluster(self, request: Request) -> Response:
        collection, view = self.collection, self.collection.view()
        id = request.path_params["id"]
        if id >= len(view.clusters) or id in view.state.merged_into or not (view.listed == id).any():
            raise HTTPException(404, f"there is no cluster {id}")
        changes = collection.changes(view)
        members = view.clusters.members(id)
        if choice(request, "order", ("central", "edge")) == "edge":
            members = members[::-1]
        images = np.concatenate((members, np.array(view.left_out.get(id, []), np.int64)))
        page, per_page = paging(request, 100)
        nearest = []
        if view.clusters.centroids is not None:
            others = view.listed[(view.listed != id) & (view.clusters.sizes[view.listed] > 0)]
            ids, scores = view.clusters.nearest(view.clusters.centroids[id], NEAREST, others)
            nearest = [
                {**card(view, changes, other), "similarity": rounded(score)}
                for other, score in zip(ids.tolist(), scores.tolist(), strict=True)
            ]
        return Json(
            {
                "cluster": card(view, changes, id),
                "nearest": nearest,
                "history": collection.sizes_of(view, id),
                "images": {
                    "total": len(images),
                    "items": [self._item(view, i) for i in images[page * per_page : (page + 1) * per_page].tolist()],
                },
            }
        )

    def image(self, request: Request) -> Response:
        view, id = self.collection.view(), self._image_id(request)
        item = self._item(view, id)
        size = self.thumbnails.dimensions(id)
        groups = self.beside.result("duplicates")
        return Json(
            {
                **item,
                "width": size and size[0],
                "height": size and size[1],
                "cluster_name": view.name(item["cluster"]),
                "duplicates": groups.like(id) if groups is not None else [],
            }
        )

    def training(self, request: Request) -> Response:
        self.collection.refresh()
        status = self.collection.status()
        return Json(
            {
                "series": self.collection.history.series(),
                "sizes": [spread(step, sizes) for step, sizes in self.collection.sizes()],
                "state": status.state,
                "step": status.step,
                "total_steps": status.total_steps,
                "eta_seconds": status.eta_seconds,
            }
        )

    # --- Pictures -----------------------------------------------------------------------------------

    def thumb(self, request: Request) -> Response:
        size = number(request, "size", 192, max(SIZES))
        if size not in SIZES:
            raise HTTPException(400, f"thumbnails have sizes {', '.join(map(str, SIZES))}")
        return shown(self.thumbnails.thumbnail(self._image_id(request), size))

    def full(self, request: Request) -> Response:
        return shown(self.thumbnails.full(self._image_id(request)))

    # --- Like what, and where -----------------------------------------------------------------------

    def similar(self, request: Request) -> Response:
        view, id = self.collection.view(), self._image_id(request)
        found = self.collection.similar_to(id, number(request, "count", 40, MOST_PER_PAGE))
        return Json({"items": self._scored(view, *found)})

    async def similar_to_upload(self, request: Request) -> Response:
        image = await body(request)
        count = number(request, "count", 40, MOST_PER_PAGE)
        return await run_in_threadpool(self._similar_to_upload, image, count)

    def _similar_to_upload(self, image: bytes, count: int) -> Response:
        try:
            row = self.collection.embed(image)
        except ImageRefused as error:
            raise HTTPException(400, f"this file cannot be used: {error}") from error
        view = self.collection.view()
        cluster, confidence = self.collection.assign(view, row)
        return Json(
            {
                "cluster": cluster,
                "cluster_name": view.name(cluster),
                "confidence": rounded(confidence),
                "items": self._scored(view, *self.collection.similar(row, count)),
            }
        )

    def map(self, request: Request) -> Response:
        view = self.collection.view()
        kind = choice(request, "kind", tuple(maps.kinds()))
        rows, seed = view.snapshot.rows, self.collection.config.seed
        directory, key = self.collection.directory, view.snapshot.features
        if rows is None:
            return Json({"progress": "there are no features yet"}, 202)
        found: maps.Map | None
        if kind == "pca":
            with self._mapping:
                if self._pca is None or self._pca[0] != key:
                    self._pca = key, maps.pca_map(rows, seed, directory, key)
                found = self._pca[1]
        else:
            found, progress = self.beside.get(
                "umap",
                key,
                lambda tell: maps.umap_map(rows, seed, directory, key, self._processes),
                stale=self.collection.status().state == "training",
            )
            if found is None:
                return Json({"progress": progress or "UMAP is being computed; this takes a minute or two"}, 202)
        return Response(
            found.records(view.clusters.labels),
            media_type="application/octet-stream",
            headers={"X-Total": str(len(self.collection)), "Cache-Control": "no-store"},
        )

    def oddities(self, request: Request) -> Response:
        view = self.collection.view()
        page, per_page = paging(request, 50)
        here = slice(page * per_page, (page + 1) * per_page)
        training = self.collection.status().state == "training"
        if choice(request, "kind", ("duplicates", "outliers")) == "outliers":
            found, progress = self.beside.get("outliers", view.version, lambda tell: outliers_of(view), stale=training)
            if found is None:
                return Json({"progress": progress or "looking for outliers"}, 202)
            ids, scores = found
            return Json({"total": len(ids), "items": self._scored(view, ids[here], scores[here])})
        if view.snapshot.rows is None:
            return Json({"progress": "there are no features yet"}, 202)
        groups, progress = self.beside.get(
            "duplicates", view.snapshot.features, lambda tell: self._duplicates(view, tell), stale=training
        )
        if groups is None:
            return Json({"progress": progress or "comparing all images"}, 202)
        some = [
            {"ids": ids[:MOST_PER_PAGE], "size": len(ids), "similarity": rounded(similarity)}
            for ids, similarity in groups.groups[here]
        ]
        return Json({"total": len(groups.groups), "groups": some})

    def _duplicates(self, view: View, tell: Callable[[str], None]) -> Duplicates:
        from odcluster.explore.oddities import Pixels, near_duplicates

        assert view.snapshot.rows is not None
        told = ["comparing all images"]

        def progress(done: int, total: int) -> None:
            told[0] = f"comparing all images: {done:,} of {total:,}"

        rows: Any = UnitRows(view.snapshot.rows, lambda: tell(told[0]))
        found = near_duplicates(rows, pixels=Pixels(self.collection.source), progress=progress)
        groups = [([int(i) for i in group.ids], float(group.similarity)) for group in found]
        return Duplicates(groups, {i: number for number, (ids, _) in enumerate(groups) for i in ids})

    # --- Edits --------------------------------------------------------------------------------------

    def edits(self, request: Request) -> Response:
        return Json({"edits": [described(edit) for edit in self.collection.curation.newest(100)]})

    async def edit(self, request: Request) -> Response:
        content = await body(request)
        try:
            given = json.loads(content)
        except ValueError as error:
            raise HTTPException(400, "the request is not JSON") from error
        if not isinstance(given, dict):
            raise HTTPException(400, "the request is not a JSON object")
        return await run_in_threadpool(self._edit, given)

    def _edit(self, given: dict[str, Any]) -> Response:
        collection = self.collection
        action = str(given.get("action"))
        sizes = {"num_images": len(collection), "num_clusters": collection.num_clusters}
        edit = collection.curation.add(action, given, **sizes)
        return Json({"edit": described(edit), "version": collection.view().version})

    def undo(self, request: Request) -> Response:
        return self._marked("undone", self.collection.curation.undo())

    def redo(self, request: Request) -> Response:
        return self._marked("redone", self.collection.curation.redo())

    def _marked(self, what: str, edit: Edit) -> Response:
        return Json({what: edit.sentence(), "edit": described(edit), "version": self.collection.view().version})

    # --- Images in answers --------------------------------------------------------------------------

    def _image_id(self, request: Request) -> int:
        id = int(request.path_params["id"])
        if id >= len(self.collection):
            raise HTTPException(404, f"there is no image {id}")
        return id

    def _item(self, view: View, id: int) -> dict[str, Any]:
        clusters = view.clusters
        return {
            "id": id,
            "name": self.collection.name(id),
            "similarity": rounded(clusters.similarities[id]),
            "cluster": int(clusters.labels[id]),
            "outlier": bool(clusters.outliers[id]),
            "moved": id in view.state.placed,
            "excluded": id in view.state.excluded,
        }

    def _scored(self, view: View, ids: Ids, scores: Floats) -> list[dict[str, Any]]:
        pairs = zip(ids.tolist(), scores.tolist(), strict=True)
        return [{**self._item(view, id), "score": rounded(score)} for id, score in pairs]
