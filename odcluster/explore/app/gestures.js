// Mouse, pen and fingers on the map: pan, zoom, lasso, hover, tap.

const STILL = 5; // pixels a press may wander and still be a tap

/** Places are pixels from the element's upper left corner. */
export function listenToPointers(element, { lassoing, pan, zoom, lasso, lassoed, hover, tap, leave }) {
  const down = new Map();
  let line = null;
  let wandered = false;

  const place = (event) => {
    const box = element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    element.setPointerCapture(event.pointerId);
    down.set(event.pointerId, { at: place(event), start: place(event) });
    if (down.size === 1) {
      wandered = false;
      line = lassoing(event) ? [place(event)] : null;
    } else if (line) {
      line = null; // a second finger: this is a pinch
      lassoed([]);
    }
  });

  element.addEventListener("pointermove", (event) => {
    const held = down.get(event.pointerId);
    const [px, py] = place(event);
    if (!held) {
      if (event.pointerType !== "touch") hover(px, py);
      return;
    }
    const [x, y] = held.at;
    if (Math.hypot(px - held.start[0], py - held.start[1]) > STILL) wandered = true;
    if (down.size === 2) {
      const [, other] = [...down].find(([id]) => id !== event.pointerId);
      const [ox, oy] = other.at;
      const before = Math.hypot(x - ox, y - oy);
      const after = Math.hypot(px - ox, py - oy);
      pan((px - x) / 2, (py - y) / 2);
      if (before > 0) zoom(after / before, (px + ox) / 2, (py + oy) / 2);
      wandered = true;
    } else if (line) {
      const [lx, ly] = line[line.length - 1];
      if (Math.hypot(px - lx, py - ly) > 3) line.push([px, py]);
      lasso(line);
    } else if (wandered) {
      pan(px - x, py - y);
    }
    held.at = [px, py];
  });

  const up = (event) => {
    if (!down.delete(event.pointerId) || down.size) return;
    if (line) lassoed(line);
    else if (!wandered && event.type === "pointerup") tap(...place(event), event.pointerType === "touch");
    line = null;
  };
  element.addEventListener("pointerup", up);
  element.addEventListener("pointercancel", up);
  element.addEventListener("pointerleave", leave);
  element.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1);
      zoom(Math.exp(-Math.max(-300, Math.min(300, pixels)) * (event.ctrlKey ? 0.01 : 0.002)), ...place(event));
    },
    { passive: false },
  );
}
