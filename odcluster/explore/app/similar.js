// Nearest neighbours of an image of the collection, or of any file that is dropped, pasted or chosen.

import { describe } from "./actions.js";
import { get, post } from "./api.js";
import { imageTile } from "./cards.js";
import { button, el, pixels, share } from "./dom.js";
import { Grid } from "./grid.js";
import { complain, say } from "./notices.js";
import { selectionBar } from "./selection.js";
import { clusterName } from "./store.js";
import { view, walk } from "./viewer.js";

const LIMIT = 50_000_000; // bytes; the server has the same limit
const COUNT = 40;

/** The file that was given last; it stays in the page until another one comes. */
let given = null;

/** Look for what resembles a file. */
export function searchFile(file) {
  if (file.size > LIMIT) {
    complain({ status: 400, message: "The file is larger than 50 MB. Give a smaller version of the image." });
    return;
  }
  if (given) URL.revokeObjectURL(given.address);
  given = { file, address: URL.createObjectURL(file), answer: null };
  if (location.hash === "#/similar/file") dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = "#/similar/file";
}

export function similar([text]) {
  const fromFile = text === "file" && given !== null;
  const id = text !== undefined && text !== "file" ? Number(text) : null;
  const chooser = el("input", { type: "file", accept: "image/*", id: "chooser", class: "hidden-input", "aria-label": "Image file" });
  chooser.addEventListener("change", () => chooser.files[0] && searchFile(chooser.files[0]));
  const choose = button({ icon: "file", onclick: () => chooser.click() }, "Choose a file");
  const hint = el("p", { class: "quiet" }, "Drop or paste an image anywhere on this page, choose a file, or press s on any image.");
  const subject = el("div", { class: "subject" });
  const waiting = el("p", { class: "empty", hidden: true }, el("span", { class: "spinner" }), " Looking …");

  const open = (image) => view(image, walk(grid, image));
  const grid = new Grid({
    label: "Similar images",
    pageSize: COUNT,
    width: 150,
    gap: 8,
    selectable: true,
    open,
    load: async () => {
      const items = fromFile ? (await ask()).items : (await get(`/api/images/${id}/similar?count=${COUNT}`)).items;
      return { total: items.length, items };
    },
    make: (image) => imageTile(image, open, share(image.score)),
  });
  const bar = selectionBar(grid);
  const head = el("div", { class: "toolbar" }, choose, chooser);
  const element = el("section", {}, el("h1", {}, "Find similar"), hint, head, subject, waiting, grid.element, bar.element);

  /** Sent once per file; refreshing the view asks again, as labels may have changed. */
  async function ask() {
    const mine = given;
    waiting.hidden = false;
    try {
      mine.answer = await post("/api/similar", mine.file);
    } finally {
      waiting.hidden = true;
    }
    const { cluster, cluster_name: name, confidence } = mine.answer;
    showSubject(mine.address, mine.file.name || "pasted image", cluster, name, `confidence ${share(confidence)}`);
    return mine.answer;
  }

  function showSubject(address, name, cluster, title, words) {
    const link = cluster >= 0 ? el("a", { href: `#/cluster/${cluster}` }, clusterName(cluster, title)) : "no cluster";
    subject.replaceChildren(
      el("img", { src: address, alt: "" }),
      el("div", {}, el("p", { class: "filename" }, name), el("p", {}, link, el("span", { class: "quiet" }, ` · ${words}`))),
    );
  }

  async function refresh() {
    if (fromFile) {
      await grid.reload();
    } else if (id !== null && Number.isInteger(id)) {
      const [known] = await Promise.all([describe(id), grid.reload()]);
      showSubject(`/thumb/${id}?size=384`, known.name, known.cluster, known.cluster_name, pixels(known));
    } else if (text === "file") {
      say("The file is not there any more. Drop it once more.");
    }
  }

  return { title: "Find similar", element, grid, refresh, keys: bar.keys, close: () => grid.close() };
}
