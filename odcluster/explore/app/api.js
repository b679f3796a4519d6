// Talking to the server. Whatever goes wrong becomes a Problem whose message is a sentence for people.

import { sentence } from "./dom.js";

class Problem extends Error {
  constructor(message, status = 0, body = null) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

const GONE = "The server does not answer. Start it again with `odcluster explore` and open the address that it prints.";
const FORBIDDEN =
  "The server does not know this page any more. Open the address that the last `odcluster explore` printed.";

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(GONE, 0);
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // Not JSON: the text itself may be the sentence.
  }
  const said = body?.error ?? (typeof body === "string" ? body : null) ?? (body === null && text.length < 300 ? text : null);
  if (response.status === 403) throw new Problem(FORBIDDEN, 403, body);
  throw new Problem(sentence(said || `The server answered ${response.status}; reload the page and try again`), response.status, body);
}

/** JSON of an address. An answer that is not ready yet (202) comes as {pending: text}. */
export async function get(path, options = {}) {
  const response = await request(path, options);
  const body = await response.json();
  return response.status === 202 ? { pending: body.progress || "working …" } : body;
}

export async function post(path, body) {
  const file = body instanceof Blob;
  const response = await request(path, {
    method: "POST",
    headers: { "X-Odcluster": "1", "Content-Type": file ? "application/octet-stream" : "application/json" },
    body: file ? body : JSON.stringify(body ?? {}),
  });
  return response.json();
}

/** The points of the map: {total, ids, x, y, clusters}, or {pending: text}. */
export async function getMap(kind, options = {}) {
  const response = await request(`/api/map?kind=${kind}`, options);
  if (response.status === 202) return { pending: (await response.json()).progress || "working …" };
  const view = new DataView(await response.arrayBuffer());
  const count = Math.floor(view.byteLength / 16);
  const points = {
    ids: new Int32Array(count),
    x: new Float32Array(count),
    y: new Float32Array(count),
    clusters: new Int32Array(count),
  };
  for (let i = 0; i < count; i++) {
    points.ids[i] = view.getInt32(16 * i, true);
    points.x[i] = view.getFloat32(16 * i + 4, true);
    points.y[i] = view.getFloat32(16 * i + 8, true);
    points.clusters[i] = view.getInt32(16 * i + 12, true);
  }
  return { ...points, total: Number(response.headers.get("X-Total") ?? count) };
}

export function query(parameters) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(kept).toString();
}
