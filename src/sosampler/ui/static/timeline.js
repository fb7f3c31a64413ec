// The timeline of one video: the scores of its candidates, where the chosen frames lie, and uniform's.

const NAMESPACE = "http://www.w3.org/2000/svg";
const LEFT = 76, RIGHT = 18, CURVE = 92, LANE = 26, AXIS = 24, TOP = 14;
const MOST_NUMBERED = 24; // marks with their number on them
const MOST_DOTS = 160;
const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400];

function draw(parent, name, attributes, text) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

export function clock(seconds) {
  const whole = Math.floor(Math.abs(seconds) + 1e-9), rest = Math.abs(seconds) - whole;
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const two = number => String(number).padStart(2, "0");
  const head = hours ? `${hours}:${two(minutes)}` : `${minutes}`;
  return `${seconds < 0 ? "-" : ""}${head}:${two(whole % 60)}${rest > 0.01 ? `.${Math.round(rest * 10)}` : ""}`;
}

const short = score => Math.abs(score) >= 1000 || (score && Math.abs(score) < 0.001) ? score.toExponential(1) : String(+score.toPrecision(3));

// `onHover(kind, place, on)` and `onPick(kind, place)` tell of marks.
export function drawTimeline(holder, view, onHover, onPick) {
  const width = Math.max(280, holder.clientWidth);
  const hasScores = view.candidate_scores !== null;
  const curve = hasScores ? CURVE : 20;
  const height = TOP + curve + 2 * LANE + AXIS;
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Time line: ${view.candidate_seconds.length} candidates, ${view.chosen.pictures.length} chosen`);
  const length = Math.max(view.end - view.begin, 1e-9);
  const x = seconds => LEFT + (width - LEFT - RIGHT) * Math.min(Math.max((seconds - view.begin) / length, 0), 1);
  const floor = TOP + curve, bottom = floor + 2 * LANE;

  drawTicks(svg, view, x, length, bottom, width);
  if (hasScores) drawCurve(svg, view, x, floor, width);
  else drawCandidates(svg, view, x, floor);
  draw(svg, "text", { x: 0, y: floor + LANE / 2 + 4, class: "name" }, "chosen");
  draw(svg, "text", { x: 0, y: floor + LANE * 1.5 + 4, class: "name" }, "uniform");
  for (const [kind, y] of [["uniform", floor + LANE * 1.5], ["chosen", floor + LANE / 2]]) {
    drawMarks(svg, kind, view[kind].pictures, x, y, onHover, onPick);
  }
  holder.replaceChildren(svg);
}

function drawTicks(svg, view, x, length, bottom, width) {
  const most = Math.max(2, Math.floor((width - LEFT - RIGHT) / 80));
  const step = STEPS.find(one => length / one <= most) ?? 7200 * Math.ceil(length / most / 7200);
  for (let number = Math.ceil(view.begin / step - 1e-9); number * step <= view.end + 1e-9; number++) {
    const place = x(number * step);
    draw(svg, "line", { x1: place, x2: place, y1: TOP, y2: bottom + 4, class: "tick" });
    draw(svg, "text", { x: place, y: bottom + 17, "text-anchor": place > width - 40 ? "end" : "middle" }, clock(number * step));
  }
  draw(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom, class: "axis" });
}

function drawCurve(svg, view, x, floor, width) {
  const points = view.candidate_seconds.map((seconds, place) => [seconds, view.candidate_scores[place]]).filter(([, score]) => score !== null);
  const scores = points.map(([, score]) => score);
  const low = Math.min(...scores), high = Math.max(...scores);
  const y = score => floor - 6 - (CURVE - 12) * (high > low ? (score - low) / (high - low) : 0.5);
  draw(svg, "text", { x: 0, y: floor - CURVE / 2 + 4, class: "name" }, "score");
  if (points.length) {
    draw(svg, "text", { x: LEFT - 8, y: y(high) + (high > low ? 4 : -6), "text-anchor": "end" }, short(high));
    if (high > low) draw(svg, "text", { x: LEFT - 8, y: y(low) + 2, "text-anchor": "end" }, short(low));
    const line = points.map(([seconds, score]) => `${x(seconds).toFixed(1)} ${y(score).toFixed(1)}`).join(" L ");
    const [first, last] = [x(points[0][0]), x(points.at(-1)[0])];
    draw(svg, "path", { d: `M ${first} ${floor} L ${line} L ${last} ${floor} Z`, class: "under" });
    draw(svg, "path", { d: `M ${line}`, class: "curve" });
  }
  for (const one of view.chosen.pictures) {
    if (one.score === null) continue;
    draw(svg, "line", { x1: x(one.seconds), x2: x(one.seconds), y1: y(one.score), y2: floor + LANE / 2, class: "stem" });
    draw(svg, "circle", { cx: x(one.seconds), cy: y(one.score), r: 4.5, class: "top" });
  }
  const half = Math.max(1.5, (width - LEFT - RIGHT) / points.length / 2);
  for (const [seconds, score] of points) {
    if (points.length <= MOST_DOTS) draw(svg, "circle", { cx: x(seconds), cy: y(score), r: 2, class: "dot" });
    const hit = draw(svg, "rect", { x: x(seconds) - half, y: TOP, width: 2 * half, height: floor - TOP, class: "hit" });
    draw(hit, "title", {}, `${clock(seconds)}, score ${short(score)}`);
  }
}

function drawCandidates(svg, view, x, floor) {
  draw(svg, "text", { x: 0, y: floor - 4, class: "name" }, "candidates");
  for (const seconds of view.candidate_seconds) {
    draw(svg, "line", { x1: x(seconds), x2: x(seconds), y1: floor - 14, y2: floor, class: "candidate" });
  }
}

function drawMarks(svg, kind, pictures, x, y, onHover, onPick) {
  const numbered = pictures.length <= MOST_NUMBERED;
  const size = numbered ? 9 : 5;
  pictures.forEach((one, place) => {
    const mark = draw(svg, "g", { class: `mark of-${kind}`, "data-place": place });
    if (kind === "chosen") draw(mark, "circle", { cx: x(one.seconds), cy: y, r: size });
    else draw(mark, "rect", { x: x(one.seconds) - size + 1, y: y - size + 1, width: 2 * size - 2, height: 2 * size - 2, rx: 2 });
    if (numbered) draw(mark, "text", { x: x(one.seconds), y: y + 4, "text-anchor": "middle" }, place + 1);
    draw(mark, "title", {}, `${one.clock}, frame ${one.frame}`);
    mark.addEventListener("mouseenter", () => onHover(kind, place, true));
    mark.addEventListener("mouseleave", () => onHover(kind, place, false));
    mark.addEventListener("click", () => onPick(kind, place));
  });
}
