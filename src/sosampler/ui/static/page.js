// The page of `sosampler ui`: controls on the left, a card for each video, all requests go to this server.

import { drawTimeline } from "/timeline.js";

const find = id => document.getElementById(id);
const WAIT = 250; // milliseconds after the last change of a control
const GONE = "The program does not answer; is sosampler ui still running?";
let about; // settings of the server
const cards = []; // in the order of the videos
let isWorking = false;

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "role") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// The response of the server, or an error with its message.
async function fetchJson(address, options) {
  let response, text;
  try {
    response = await fetch(address, options);
    text = await response.json();
  } catch {
    throw new Error(GONE);
  }
  if (!response.ok) throw new Error(text.error);
  return text;
}

// ---- controls

function fill(id, entries, chosen) {
  find(id).replaceChildren(...entries.map(one => make("option", { value: one.name, textContent: one.name || "auto" })));
  find(id).value = chosen ?? "";
}

const policy = () => about.policies.find(one => one.name === find("policy").value);

function explain() {
  find("policy-text").textContent = policy().description;
  find("candidates-text").textContent = about.modes.find(one => one.name === find("candidates").value).description;
  const hasQuery = find("query").value.trim() !== "";
  find("policy").disabled = hasQuery;
  const diversity = hasQuery || policy().diversity;
  find("diversity").disabled = !diversity;
  const chosen = about.diversities.find(one => one.name === find("diversity").value);
  find("diversity-text").textContent = diversity ? chosen.description : "for policies that give scores";
}

function settings() {
  const number = id => (find(id).value === "" ? null : Number(find(id).value));
  return {
    num_frames: number("num-frames"),
    num_candidates: number("num-candidates"),
    policy: find("policy").value,
    candidates: find("candidates").value || null,
    diversity: find("diversity").disabled ? "none" : find("diversity").value,
    query: find("query").value.trim(),
  };
}

// Of this tab, so that loading it again shows the same results, which the server still has.
const REMEMBERED = "settings";

function firstSettings() {
  let saved = null;
  try {
    saved = JSON.parse(sessionStorage.getItem(REMEMBERED));
  } catch { /* nothing is stored where the browser forbids it */ }
  const isKnown = about.policies.some(one => one.name === saved?.policy); // the program may have been started anew
  return isKnown ? { ...about.first, ...saved } : about.first;
}

function remember() {
  try {
    sessionStorage.setItem(REMEMBERED, JSON.stringify(settings()));
  } catch { /* as above */ }
}

function prepareControls() {
  const first = firstSettings();
  fill("policy", about.policies, first.policy);
  fill("candidates", about.modes, first.candidates);
  fill("diversity", about.diversities, first.diversity);
  find("query-field").hidden = !about.queries;
  find("query").value = first.query ?? "";
  for (const id of ["frames-range", "num-frames"]) {
    find(id).max = about.max_frames;
    find(id).value = first.num_frames;
  }
  find("num-candidates").max = about.max_candidates;
  find("num-candidates").value = first.num_candidates ?? "";
  find("max-upload").textContent = `${about.max_upload_text} at most each`;
  explain();
  let waiting;
  const changed = () => {
    explain();
    remember();
    clearTimeout(waiting);
    waiting = setTimeout(work, WAIT);
  };
  find("frames-range").addEventListener("input", () => { find("num-frames").value = find("frames-range").value; });
  find("num-frames").addEventListener("input", () => { find("frames-range").value = find("num-frames").value; });
  find("settings").addEventListener("input", event => { if (event.target.id !== "files") changed(); });
  find("settings").addEventListener("submit", event => event.preventDefault());
}

// ---- one card a video

class Card {
  constructor(name) {
    this.video = this.view = null;
    this.shownFor = ""; // the settings that it shows
    this.title = make("h2", { textContent: name });
    this.facts = make("ul", { className: "facts" });
    this.state = make("p", { className: "state", hidden: true });
    this.progress = make("progress", { max: 1, hidden: true });
    this.error = make("p", { className: "error", role: "alert", hidden: true });
    this.time = make("figure", { className: "time" });
    this.rows = make("div");
    this.shown = make("div", { className: "shown", hidden: true }, this.time, this.rows);
    const remove = make("button", { type: "button", className: "remove", textContent: "×", title: "Remove" });
    remove.setAttribute("aria-label", `Remove ${name}`);
    remove.addEventListener("click", () => this.remove());
    this.element = make(
      "article", { className: "card" },
      make("div", { className: "head" }, this.title, this.facts), remove, this.state, this.progress, this.error, this.shown,
    );
    new ResizeObserver(() => this.drawTime()).observe(this.time);
    cards.push(this);
    find("videos").append(this.element);
    find("empty").hidden = true;
  }

  setVideo(video) {
    this.video = video;
    this.title.textContent = video.name;
    this.setFacts(video.facts);
  }

  setFacts(facts) {
    this.facts.replaceChildren(...facts.map(fact => make("li", { textContent: fact })));
  }

  say(sentence) {
    this.state.textContent = sentence;
    this.state.hidden = !sentence;
  }

  fail(sentence) {
    this.view = null;
    this.shown.hidden = true;
    this.error.textContent = sentence;
    this.error.hidden = false;
  }

  async remove() {
    cards.splice(cards.indexOf(this), 1);
    this.element.remove();
    this.request?.abort();
    find("empty").hidden = cards.length > 0;
    offerDownloads();
    if (this.video) await fetchJson(`/videos/${this.video.id}`, { method: "DELETE", keepalive: true }).catch(() => {}); // gone either way
  }

  async choose(wanted) {
    this.element.setAttribute("aria-busy", "true");
    this.say(this.view ? "" : "Choosing frames …");
    try {
      const view = await fetchJson(`/videos/${this.video.id}/select`, { method: "POST", body: JSON.stringify(wanted) });
      this.error.hidden = true;
      this.show(view);
    } catch (error) {
      this.fail(error.message);
    }
    this.say("");
    this.element.removeAttribute("aria-busy");
  }

  show(view) {
    this.view = view;
    this.setFacts(view.facts);
    const chosen = view.chosen.pictures.length, candidates = view.candidate_seconds.length;
    this.rows.replaceChildren(
      this.strip("chosen", `${chosen} of ${candidates} ${view.mode} candidates, ${view.took.toFixed(view.took < 1 ? 2 : 1)} s`),
      this.strip("uniform", view.shared ? `${view.shared} of them chosen too` : "no frame in common"),
    );
    if (view.notes.length) {
      this.rows.append(make("ul", { className: "notes" }, ...view.notes.map(note => make("li", { textContent: note }))));
    }
    this.shown.hidden = false;
    this.drawTime();
  }

  drawTime() {
    if (!this.view || !this.time.clientWidth || this.drawn === this.view && this.width === this.time.clientWidth) return;
    [this.drawn, this.width] = [this.view, this.time.clientWidth];
    drawTimeline(this.time, this.view, (...hover) => this.hover(...hover), (...pick) => openFull(this, ...pick));
  }

  strip(kind, subtitle) {
    const { policy, pictures } = this.view[kind];
    const list = make("ol", { className: "strip" }, ...pictures.map((one, place) => this.shot(kind, one, place)));
    list.style.setProperty("--columns", Math.max(4, Math.min(8, pictures.length)));
    const title = make("h3", { className: `policy of-${kind}` }, make("span", { textContent: policy }), make("small", { textContent: subtitle }));
    return make("section", { className: `of-${kind}` }, title, list);
  }

  shot(kind, one, place) {
    const picture = make("img", { src: one.url, alt: `frame ${one.frame} at ${one.clock}` });
    const button = make("button", { type: "button" }, picture, make("span", { className: "place", textContent: place + 1 }));
    button.addEventListener("click", () => openFull(this, kind, place));
    const below = make("div", { className: "below" }, make("b", { textContent: one.clock }), make("span", { textContent: `#${one.frame}` }));
    if (one.score !== null) below.append(make("span", { textContent: String(+one.score.toPrecision(3)) }));
    const item = make("li", { className: "shot" }, button, below);
    item.addEventListener("mouseenter", () => this.hover(kind, place, true));
    item.addEventListener("mouseleave", () => this.hover(kind, place, false));
    return item;
  }

  // A mark on the timeline and its frame are highlighted together.
  hover(kind, place, on) {
    this.time.querySelector(`.mark.of-${kind}[data-place="${place}"]`)?.classList.toggle("hot", on);
    this.rows.querySelectorAll(`.of-${kind} .shot`)[place]?.classList.toggle("hot", on);
  }
}

// ---- work: one video after the other, always by the newest settings

async function work() {
  offerDownloads();
  if (isWorking) return;
  isWorking = true;
  for (;;) {
    const wanted = settings(), key = JSON.stringify(wanted);
    const card = cards.find(one => one.video && one.shownFor !== key);
    if (!card) break;
    card.shownFor = key;
    await card.choose(wanted);
    offerDownloads();
  }
  isWorking = false;
}

// Links to what is shown; none while it changes.
function offerDownloads() {
  const key = JSON.stringify(settings());
  const isReady = cards.every(one => !one.video || (one.shownFor === key && !one.element.hasAttribute("aria-busy")));
  const results = cards.filter(one => one.view).map(one => `result=${one.view.result}`);
  for (const [id, address] of [["get-frames", "/frames.zip"], ["get-json", "/selection.json"]]) {
    const link = find(id), isThere = isReady && results.length > 0;
    link.setAttribute("aria-disabled", String(!isThere));
    if (isThere) link.href = `${address}?${results.join("&")}`;
    else link.removeAttribute("href");
  }
}

// ---- uploads, one after the other

let uploads = Promise.resolve();

function sizeText(size) {
  const [unit, each] = [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]].find(([, one]) => size >= one) ?? ["bytes", 1];
  return `${+(size / each).toPrecision(3)} ${unit}`;
}

function take(files) {
  for (const file of files) {
    const card = new Card(file.name);
    if (file.size > about.max_upload) {
      card.fail(`${file.name} has ${sizeText(file.size)}; uploads must be at most ${about.max_upload_text}. Cut it, or start the page with a larger --max-upload, or give it as sosampler ui FILE`);
      continue;
    }
    card.say("Waiting to be sent …");
    uploads = uploads.then(() => send(file, card));
  }
}

async function send(file, card) {
  if (!cards.includes(card)) return; // removed meanwhile
  card.say("Sending …");
  card.progress.hidden = false;
  try {
    card.setVideo(await upload(file, card));
  } catch (error) {
    card.fail(error.message);
  }
  card.progress.hidden = true;
  card.say("");
  work();
}

// Not fetch, which does not report progress.
function upload(file, card) {
  return new Promise((resolve, reject) => {
    const request = (card.request = new XMLHttpRequest());
    request.open("POST", "/videos");
    request.setRequestHeader("X-Name", encodeURIComponent(file.name));
    request.responseType = "json";
    request.upload.onprogress = event => { card.progress.value = event.loaded / event.total; };
    request.onload = () => (request.status === 200 ? resolve(request.response) : reject(new Error(request.response?.error ?? GONE)));
    request.onerror = () => reject(new Error(GONE));
    request.onabort = () => reject(new Error("Removed."));
    request.send(file);
  });
}

function prepareDrop() {
  find("files").addEventListener("change", () => {
    take(find("files").files);
    find("files").value = ""; // the same file may come again
  });
  const isOver = on => event => {
    event.preventDefault();
    find("drop").classList.toggle("over", on);
  };
  document.addEventListener("dragover", isOver(true));
  document.addEventListener("dragleave", isOver(false));
  document.addEventListener("drop", event => {
    isOver(false)(event);
    take(event.dataTransfer.files);
  });
}

// ---- a frame in its full size

let open; // which one: card, kind, place

function openFull(card, kind, place) {
  open = { card, kind, place };
  const { pictures } = card.view[kind], one = pictures[place];
  find("full-picture").src = `/videos/${card.video.id}/frames/${one.frame}.jpg`;
  find("full-picture").alt = `frame ${one.frame} at ${one.clock}`;
  const score = one.score === null ? "" : `, score ${+one.score.toPrecision(3)}`;
  find("full-text").textContent = `${card.view[kind].policy}: ${place + 1} of ${pictures.length}, ${one.clock}, frame ${one.frame}${score}`;
  find("earlier").disabled = place === 0;
  find("later").disabled = place === pictures.length - 1;
  if (!find("full").open) find("full").showModal();
}

function step(by) {
  const place = open.place + by;
  if (open.card.view?.[open.kind].pictures[place]) openFull(open.card, open.kind, place);
}

function prepareFull() {
  find("earlier").addEventListener("click", () => step(-1));
  find("later").addEventListener("click", () => step(1));
  find("close").addEventListener("click", () => find("full").close());
  find("full").addEventListener("click", event => { if (event.target === find("full")) find("full").close(); });
  find("full").addEventListener("close", () => find("full-picture").removeAttribute("src"));
  find("full").addEventListener("keydown", event => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
}

async function start() {
  try {
    about = await fetchJson("/about");
  } catch (error) {
    find("empty").replaceChildren(make("p", { className: "error", role: "alert", textContent: error.message }));
    return;
  }
  prepareControls();
  prepareDrop();
  prepareFull();
  for (const video of about.videos) new Card(video.name).setVideo(video);
  work();
}

start();
