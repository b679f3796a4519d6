"""torchvision is the reference for the views; here it may need help to be imported."""

from __future__ import annotations

import odcluster.models.compat  # noqa: F401
