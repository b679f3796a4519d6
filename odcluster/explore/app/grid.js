// A list of any length laid out as a grid: only what is near the screen exists, the rest is space.
//
// Items come in pages from `load(page)`. Every cell is a square plus `below` pixels, so that positions are arithmetic and a
// list of a million items scrolls like one of ten. Arrow keys, selection by click, Shift and drag are arithmetic, too.

import { el } from "./dom.js";
import { complain } from "./notices.js";

export class Grid {
  /**
   * load(page) -> {total, items}; make(item) -> <li> whose [data-main] is what has the focus; state(item) -> what else its
   * looks depend on; open(item) on Enter;
   * selectable: click, Shift, drag and Space select, told to `selected(map)`; scroller: the element that scrolls, else the window.
   */
  constructor({ label, pageSize, load, make, state, open, width = 220, below = 0, gap = 16, selectable = false, selected, scroller = null }) {
    Object.assign(this, { pageSize, load, make, state, open, width, below, gap, selectable, selected, scroller });
    this.element = el("ul", { class: selectable ? "grid selectable" : "grid", "aria-label": label });
    this.total = 0;
    this.pages = new Map();
    this.asked = new Map();
    this.nodes = new Map();
    this.selection = new Map();
    this.active = 0;
    this.anchor = 0;
    this.generation = 0;
    this.awaited = null; // index of a cell that gets the focus when its item arrives
    this.onscroll = () => this.schedule();
    this.observer = new ResizeObserver(() => this.schedule());
    this.observer.observe(this.element);
    (scroller ?? window).addEventListener("scroll", this.onscroll, { passive: true });
    this.element.addEventListener("keydown", (event) => this.onkey(event));
    this.element.addEventListener("focusin", (event) => this.onfocus(event));
    if (selectable) this.listenForSelecting();
  }

  close() {
    this.generation++;
    this.observer.disconnect();
    (this.scroller ?? window).removeEventListener("scroll", this.onscroll);
  }

  // ---- data ----

  /** Ask again for what is on the screen; what is shown stays until the answers are there. */
  async reload() {
    const generation = ++this.generation;
    const { first, last } = this.range();
    const wanted = new Set([0]);
    for (let i = Math.max(first, 0); i <= last; i += 1) wanted.add(Math.floor(i / this.pageSize));
    const answers = await Promise.all([...wanted].map(async (page) => [page, await this.load(page)]));
    if (generation !== this.generation) return;
    const before = this.current;
    const focused = this.focusedIndex() !== null && document.activeElement.tagName !== "INPUT";
    this.pages = new Map(answers.map(([page, answer]) => [page, answer.items]));
    this.asked.clear();
    this.total = answers[0][1].total;
    const active = this.whereNow(before);
    for (const [index, node] of this.nodes) if (index >= this.total) this.drop(index, node);
    this.render();
    this.active = active; // rendering may have moved the focus
    if (focused) this.focus(active, false);
    else this.redress();
  }

  /** The keyboard stays with its item when the order changes, and with its place when the item was excluded or is gone. */
  whereNow(before) {
    for (const [page, items] of this.pages) {
      const at = items.findIndex((item) => item.id === before?.id && item.excluded === before.excluded);
      if (at >= 0) return page * this.pageSize + at;
    }
    return Math.max(0, Math.min(this.active, this.total - 1));
  }

  item(index) {
    return this.pages.get(Math.floor(index / this.pageSize))?.[index % this.pageSize];
  }

  async fetchPage(page) {
    if (this.pages.has(page)) return;
    if (!this.asked.has(page)) {
      const generation = this.generation;
      const arrived = this.load(page).then((answer) => {
        if (generation !== this.generation) return;
        this.pages.set(page, answer.items);
        this.schedule();
      });
      arrived.catch((error) => {
        this.asked.delete(page);
        complain(error);
      });
      this.asked.set(page, arrived);
    }
    await this.asked.get(page);
  }

  /** The item that has the keyboard's attention. */
  get current() {
    return this.item(this.active);
  }

  // ---- layout ----

  measure() {
    const width = this.element.clientWidth || 1;
    const columns = Math.max(1, Math.floor((width + this.gap) / (this.width + this.gap)) || 1);
    const least = width < 520 ? Math.max(columns, this.width > 160 ? 2 : 3) : columns;
    const side = (width - this.gap * (least - 1)) / least;
    return { columns: least, side, rowHeight: side + this.below + this.gap };
  }

  window() {
    const box = this.scroller ? this.scroller.getBoundingClientRect() : { top: 0, height: innerHeight };
    return { top: box.top - this.element.getBoundingClientRect().top, height: box.height };
  }

  range() {
    const { columns, rowHeight } = this.measure();
    const { top, height } = this.window();
    const first = Math.floor((top - height) / rowHeight) * columns;
    const last = Math.ceil((top + 2 * height) / rowHeight) * columns - 1;
    return { first: Math.max(0, first), last: Math.max(0, Math.min(last, Math.max(this.total - 1, this.pageSize - 1))) };
  }

  place(index, { columns, side, rowHeight }) {
    return { left: (index % columns) * (side + this.gap), top: Math.floor(index / columns) * rowHeight };
  }

  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.render();
    });
  }

  render() {
    const layout = this.measure();
    const rows = Math.ceil(this.total / layout.columns);
    this.element.style.height = rows ? `${rows * layout.rowHeight - this.gap}px` : "0";
    if (!this.element.isConnected || !this.total) return;
    const { first, last } = this.range();
    const wanted = new Set();
    for (let i = first; i <= Math.min(last, this.total - 1); i++) wanted.add(i);
    const focused = this.focusedIndex();
    if (focused !== null) wanted.add(focused);
    for (const [index, node] of this.nodes) if (!wanted.has(index)) this.drop(index, node);
    const indices = [...wanted].sort((a, b) => b - a);
    let next = null;
    for (const index of indices) {
      const node = this.node(index);
      const { left, top } = this.place(index, layout);
      node.style.transform = `translate(${left}px, ${top}px)`;
      node.style.width = `${layout.side}px`;
      node.style.height = `${layout.side + this.below}px`;
      if (node.nextSibling !== next || node.parentNode !== this.element) this.element.insertBefore(node, next);
      next = node;
    }
    this.askFor(first, Math.min(last, this.total - 1));
  }

  /** Pages are asked for when scrolling rests, so that a flight over a thousand pages asks for none of them. */
  askFor(first, last) {
    clearTimeout(this.asking);
    this.asking = setTimeout(() => {
      for (let page = Math.floor(first / this.pageSize); page <= Math.floor(last / this.pageSize); page++) {
        this.fetchPage(page).catch(() => {});
      }
    }, 40);
  }

  node(index) {
    const item = this.item(index);
    const content = item === undefined ? "" : JSON.stringify([item, this.state?.(item)]);
    const old = this.nodes.get(index);
    if (old && old.content === content) return old;
    const node = item === undefined ? el("li", { class: "waiting", "aria-hidden": "true" }) : this.make(item);
    node.content = content;
    node.dataset.key = item?.id ?? "";
    node.dataset.index = index;
    node.setAttribute("aria-setsize", this.total);
    node.setAttribute("aria-posinset", index + 1);
    let focused = item !== undefined && index === this.awaited;
    if (old) {
      // A name being typed must survive an update of its card.
      if (old.querySelector("input")) return old;
      focused ||= old.contains(document.activeElement);
      for (const picture of node.querySelectorAll("img")) {
        const same = [...old.querySelectorAll("img")].find((other) => other.src === picture.src);
        if (same) picture.replaceWith(same); // loaded already: no flicker
      }
      old.replaceWith(node);
    }
    this.nodes.set(index, node);
    this.dress(index, node);
    if (focused) this.enter(index, node);
    return node;
  }

  /** What depends on selection and on where the keyboard is. */
  dress(index, node) {
    const item = this.item(index);
    const main = node.querySelector("[data-main]");
    if (this.selectable && item && main) {
      const on = this.selection.has(item.id);
      node.classList.toggle("selected", on);
      main.setAttribute("aria-pressed", on);
    }
    for (const control of node.querySelectorAll("a, button")) control.tabIndex = index === this.active ? 0 : -1;
  }

  redress() {
    for (const [index, node] of this.nodes) this.dress(index, node);
  }

  drop(index, node) {
    this.nodes.delete(index);
    node.remove();
  }

  // ---- keyboard ----

  focusedIndex() {
    const holder = document.activeElement?.closest?.("[data-index]");
    return holder && this.element.contains(holder) ? Number(holder.dataset.index) : null;
  }

  onfocus(event) {
    const holder = event.target.closest("[data-index]");
    if (!holder || Number(holder.dataset.index) === this.active) return;
    this.active = Number(holder.dataset.index);
    this.redress();
  }

  focus(index = this.active, reveal = true) {
    if (!this.total) return;
    this.active = Math.max(0, Math.min(index, this.total - 1));
    if (reveal) this.reveal(this.active);
    this.render();
    this.redress();
    const node = this.nodes.get(this.active) ?? this.node(this.active);
    this.enter(this.active, node);
  }

  /** Give a cell the focus: now, or when its item has arrived. */
  enter(index, node) {
    if (!node.parentNode) this.element.append(node);
    const main = node.querySelector("[data-main]");
    this.awaited = main ? null : index;
    main?.focus({ preventScroll: true });
  }

  reveal(index) {
    const { side, rowHeight, columns } = this.measure();
    const { top } = this.place(index, { columns, side, rowHeight });
    const view = this.window();
    const margin = this.scroller ? 8 : 84;
    let by = 0;
    if (top < view.top + margin) by = top - view.top - margin;
    else if (top + side + this.below > view.top + view.height - margin) by = top + side + this.below - view.top - view.height + margin;
    if (by) (this.scroller ?? window).scrollBy({ top: by, behavior: "instant" });
  }

  onkey(event) {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" && this.selectable && event.target.closest("[data-main]")) {
      event.preventDefault();
      if (this.current) this.open(this.current);
      return;
    }
    const { columns, rowHeight } = this.measure();
    const screen = Math.max(1, Math.floor(this.window().height / rowHeight)) * columns;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -screen, PageDown: screen };
    let to = event.key in steps ? this.active + steps[event.key] : null;
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = this.total - 1;
    if (to === null) return;
    event.preventDefault();
    event.stopPropagation();
    if ((to < 0 || to >= this.total) && event.key.startsWith("Arrow")) to = this.active;
    this.focus(to);
    if (event.shiftKey && this.selectable) this.selectRange(this.anchor, this.active);
  }

  // ---- selection ----

  listenForSelecting() {
    this.element.addEventListener("click", (event) => {
      const main = event.target.closest("[data-main]");
      const holder = event.target.closest("[data-index]");
      if (!main || !holder || this.dragged) return;
      const index = Number(holder.dataset.index);
      const item = this.item(index);
      if (!item) return;
      if (event.shiftKey) this.selectRange(this.anchor, index);
      else {
        if (this.selection.has(item.id)) this.selection.delete(item.id);
        else this.selection.set(item.id, item);
        this.anchor = index;
        this.tellSelected();
      }
    });
    this.element.addEventListener("dblclick", (event) => {
      const holder = event.target.closest("[data-main]")?.closest("[data-index]");
      const item = holder && this.item(Number(holder.dataset.index));
      if (item) this.open(item);
    });
    this.element.addEventListener("pointerdown", (event) => this.startDrag(event));
  }

  tellSelected() {
    this.redress();
    this.selected?.(this.selection);
  }

  clear() {
    this.selection.clear();
    this.tellSelected();
  }

  async selectRange(from, to) {
    const [first, last] = from < to ? [from, to] : [to, from];
    const pages = [];
    for (let page = Math.floor(first / this.pageSize); page <= Math.floor(last / this.pageSize); page++) pages.push(page);
    try {
      await Promise.all(pages.map((page) => this.fetchPage(page)));
    } catch {
      return; // already said by fetchPage
    }
    for (let i = first; i <= last; i++) {
      const item = this.item(i);
      if (item) this.selection.set(item.id, item);
    }
    this.tellSelected();
  }

  /** A rectangle drawn with the mouse selects what it touches; a finger scrolls instead. */
  startDrag(event) {
    this.dragged = false;
    if (event.button !== 0 || event.pointerType === "touch" || event.target.closest("input, .corner")) return;
    const box = () => this.element.getBoundingClientRect();
    const start = { x: event.clientX - box().left, y: event.clientY - box().top };
    const before = new Map(this.selection);
    const band = el("div", { class: "band" });
    const move = (moved) => {
      const end = { x: moved.clientX - box().left, y: moved.clientY - box().top };
      if (!this.dragged && Math.hypot(end.x - start.x, end.y - start.y) < 8) return;
      if (!this.dragged) this.element.append(band);
      this.dragged = true;
      const [left, right] = [Math.min(start.x, end.x), Math.max(start.x, end.x)];
      const [top, bottom] = [Math.min(start.y, end.y), Math.max(start.y, end.y)];
      band.style.transform = `translate(${left}px, ${top}px)`;
      band.style.width = `${right - left}px`;
      band.style.height = `${bottom - top}px`;
      this.selection = new Map(before);
      for (const item of this.touched(left, top, right, bottom)) this.selection.set(item.id, item);
      this.tellSelected();
      const edge = moved.clientY < 90 ? -14 : moved.clientY > innerHeight - 60 ? 14 : 0;
      if (edge) (this.scroller ?? window).scrollBy(0, edge);
    };
    const stop = () => {
      band.remove();
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
      removeEventListener("pointercancel", stop);
      // The click that ends a drag comes right after and must not toggle; later ones must.
      setTimeout(() => (this.dragged = false), 0);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
    addEventListener("pointercancel", stop);
  }

  touched(left, top, right, bottom) {
    const { columns, side, rowHeight } = this.measure();
    const found = [];
    for (let row = Math.max(0, Math.floor(top / rowHeight)); row * rowHeight <= bottom; row++) {
      if (row * rowHeight + side < top) continue;
      for (let column = 0; column < columns; column++) {
        const x = column * (side + this.gap);
        const item = x <= right && x + side >= left ? this.item(row * columns + column) : undefined;
        if (item) found.push(item);
      }
      if ((row + 1) * columns > this.total) break;
    }
    return found;
  }
}
