"""Pictures inside a page: thumbnails as text, within the bytes that the page has for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from html import escape

import numpy as np
from PIL import features

from odcluster.data.sources import Source
from odcluster.errors import ImageRefused
from odcluster.explore.mosaic import square_thumbnail


class Pictures:
    """Thumbnails as text for a page, until the bytes given for them are used up."""

    def __init__(self, source: Source, room: int) -> None:
        self.source, self.room = source, room
        self.left_out = self.unreadable = 0
        self._format = "WEBP" if features.check("webp") else "JPEG"

    def size(self, ids: Iterable[int], side: int) -> float:
        """Bytes of one of these on average."""
        sizes = [len(self._encoded(id, side)[0]) for id in ids]
        return float(np.mean(sizes)) + 120 if sizes else 0.0

    def tile(self, id: int, side: int, name: str) -> str:
        """An <img>, or an empty grey square where there is no picture or no room for one."""
        shown = escape(name)
        if self.room <= 0:
            self.left_out += 1
            return f'<span class="tile" role="img" aria-label="{shown}" title="{shown}"></span>'
        data, coarse = self._encoded(id, side)
        self.room -= len(data) + 120
        if not data:
            self.unreadable += 1
            return (
                f'<span class="tile" role="img" aria-label="{shown} (unreadable)" title="{shown}: unreadable"></span>'
            )
        look = ' class="tile coarse"' if coarse else ' class="tile"'
        uri = f"data:image/{self._format.lower()};base64,{data}"
        return f'<img{look} src="{uri}" alt="{shown}" title="{shown}" width="{side}" height="{side}">'

    def _encoded(self, id: int, side: int) -> tuple[str, bool]:
        """The central square as base64, and whether it has fewer pixels than asked for; "" where it is unreadable."""
        try:
            image = self.source.image(id, min_size=side)
        except ImageRefused:
            return "", False
        own = min(image.shape[:2])
        buffer = io.BytesIO()
        square_thumbnail(image, min(side, own)).save(buffer, self._format, quality=72 if own >= side else 85)
        return base64.b64encode(buffer.getvalue()).decode("ascii"), 2 * own <= side
