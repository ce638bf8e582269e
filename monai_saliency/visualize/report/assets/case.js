// The page of a case: its controls, and what they do to the viewer of volume.js (3D) or picture.js (2D).
"use strict";

const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data").textContent);
const dims = page.shape.length;

/** A volume of the page: its sizes, its codes, and the step and low by which value = low + step * code. */
async function decode(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const header = new DataView(buffer);
  const size = [];
  for (let axis = 1; axis <= header.getInt16(40, true); axis++) size.push(header.getInt16(40 + 2 * axis, true));
  const kind = header.getInt16(70, true) === 2 ? Uint8Array : Int16Array;
  const codes = new kind(buffer, header.getFloat32(108, true));
  return { size, codes, step: header.getFloat32(112, true), low: header.getFloat32(116, true) };
}

/** The stops of a colour scale, from the weakest to the strongest, as [red, green, blue]. */
function stops(negative) {
  const names = negative ? [...page.colours.cold].reverse() : page.colours.warm;
  return names.map((name) => [1, 3, 5].map((place) => parseInt(name.slice(place, place + 2), 16)));
}

/** The colour of a strength in [0, 1], which is the square root of the value over the scale. */
function colour(strength, negative) {
  const all = stops(negative);
  const place = Math.min(1, Math.max(0, strength)) * (all.length - 1);
  const left = Math.min(all.length - 2, Math.floor(place));
  return all[left].map((value, i) => Math.round(value + (place - left) * (all[left + 1][i] - value)));
}

const times = (matrix, [x, y, z]) => [0, 1, 2].map(
  (row) => matrix[row][0] * x + matrix[row][1] * y + matrix[row][2] * z + matrix[row][3],
);

/** Of a shown voxel: its place in the maps' file, and in the scanner (mm). */
const inFile = (voxel) => voxel.map((v, axis) => page.start[axis] + page.stride[axis] * v);
const inScanner = (voxel) => times(page.affine, [...inFile(voxel), 0, 0].slice(0, 3));

/** The shown voxel nearest to a place in the scanner. */
function shownAt(mm, size) {
  const file = times(page.inverse, mm);
  return size.slice(0, dims).map((count, axis) =>
    Math.min(count - 1, Math.max(0, Math.round((file[axis] - page.start[axis]) / page.stride[axis]))));
}

const brief = (value, digits = 3) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** digits && size < 1e7) return value.toFixed(0);
  return size < 1e-3 || size >= 1e7 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
};

/** The pen of the sheet for contours, which is as large as given and empty; in the memory of the CPU, for few lines. */
function emptied(sheet, width, height) {
  const pen = sheet.getContext("2d", { willReadFrequently: true });
  if (sheet.width !== width || sheet.height !== height) [sheet.width, sheet.height] = [width, height];
  pen.clearRect(0, 0, width, height);
  return pen;
}

/**
 * Trace the borders between labels, one pixel wide. `at(x, y)` is the label of a cell, 0 outside; `place(x, y)` is where a
 * cell's first corner lies on the canvas.
 */
function contour(pen, columns, rows, at, place) {
  pen.beginPath();
  const line = (...ends) => ends.forEach(([x, y], i) => {
    const [left, top] = place(x, y).map((v) => Math.round(v) + 0.5);
    if (i) pen.lineTo(left, top);
    else pen.moveTo(left, top);
  });
  for (let y = 0; y <= rows; y++) {
    for (let x = 0; x <= columns; x++) {
      if (at(x, y) !== at(x - 1, y)) line([x, y], [x, y + 1]);
      if (at(x, y) !== at(x, y - 1)) line([x, y], [x + 1, y]);
    }
  }
  for (const [width, colour] of [[3, "rgb(0 0 0 / 0.4)"], [1, "#ffffff"]]) {
    Object.assign(pen, { lineWidth: width, strokeStyle: colour });
    pen.stroke();
  }
}

const presets = {
  "soft tissue": [40, 400], "brain": [40, 80], "subdural": [75, 215], "lung": [-600, 1500],
  "mediastinum": [50, 350], "liver": [60, 160], "bone": [400, 1800],
};

class CasePage {
  constructor(viewer, volumes) {
    this.viewer = viewer;
    this.volumes = volumes; // of each map: { map, error }, which are decoded when they are looked at
    this.choice = { map: 0, isError: false };
    this.voxel = [...page.maps[0].focus];
  }

  /** What is drawn: a map or a standard error, with its scale. */
  get shown() {
    const map = page.maps[this.choice.map];
    const { isError } = this.choice;
    const own = isError ? map.ownError : map.own;
    return { map, isError, signed: map.signed && !isError, scale: byId("scale").value === "own" ? own : map.scale };
  }

  async volume(number, kind) {
    const found = this.volumes[number] ?? (this.volumes[number] = {});
    const text = kind === "error" ? page.maps[number].error : page.maps[number].volume;
    if (text !== null && !found[kind]) found[kind] = await decode(text);
    return found[kind] ?? null;
  }

  /** The value of a slider, which grows with the square so that small values can be set. */
  get threshold() {
    return this.shown.scale * (byId("threshold").value / 1000) ** 2;
  }

  setThreshold(value) {
    byId("threshold").value = 1000 * Math.sqrt(Math.min(1, value / this.shown.scale));
  }

  async choose(value) {
    this.choice = { map: parseInt(value, 10), isError: value.endsWith("e") };
    this.setThreshold(this.choice.isError ? 0 : page.maps[this.choice.map].floor);
    await this.draw();
    const { isError, map } = this.shown;
    const { codes, step } = await this.volume(this.choice.map, isError ? "error" : "map");
    const [low, high] = [Math.min, Math.max].map((further) => brief(step * codes.reduce((a, b) => further(a, b), 0)));
    byId("words").textContent = isError
      ? `standard error of the ${map.words}: up to ${high}`
      : `${map.words}. This map: ${low} to ${high}`;
  }

  /** Draw the chosen map: strengths in [-1, 1], 0 where nothing is coloured. */
  async draw() {
    const { scale, isError, map } = this.shown;
    const own = await this.volume(this.choice.map, isError ? "error" : "map");
    const hides = !isError && byId("chance")?.checked;
    const error = hides ? await this.volume(this.choice.map, "error") : null;
    const least = Math.max(this.threshold, own.step / 2);
    const strengths = new Float32Array(own.codes.length);
    for (let i = 0; i < strengths.length && !(hides && map.nothing); i++) {
      const value = own.step * own.codes[i];
      const size = Math.abs(value);
      if (size < least || (error !== null && size < 2 * error.step * error.codes[i])) continue;
      strengths[i] = Math.sign(value) * Math.sqrt(Math.min(1, size / scale));
    }
    this.viewer.setMap(strengths, byId("opacity").value / 1000);
    byId("threshold-value").textContent = brief(this.threshold);
    byId("opacity-value").textContent = `${Math.round(byId("opacity").value / 10)} %`;
    this.drawBar();
    await this.read(this.voxel);
  }

  drawBar() {
    const { scale, signed } = this.shown;
    const canvas = byId("bar");
    const pen = canvas.getContext("2d");
    const [left, width, height] = [26, canvas.width - 52, 26];
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (let x = 0; x < width; x++) {
      const strength = signed ? (2 * x) / (width - 1) - 1 : x / (width - 1);
      const isBelow = scale * strength * strength < this.threshold;
      pen.fillStyle = isBelow ? "#c9ccd1" : `rgb(${colour(Math.abs(strength), strength < 0)})`;
      pen.fillRect(left + x, 0, 1, height);
    }
    pen.fillStyle = getComputedStyle(canvas).color;
    pen.font = "21px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const share of signed ? [-1, -0.5, -0.1, 0, 0.1, 0.5, 1] : [0, 0.01, 0.1, 0.5, 1]) {
      const strength = Math.sign(share) * Math.sqrt(Math.abs(share));
      const x = left + ((signed ? (strength + 1) / 2 : strength) * (width - 1));
      pen.fillRect(x, height, 1, 6);
      pen.fillText(brief(share * scale, 2), x, height + 28);
    }
  }

  /** Put the crosshair on a shown voxel. */
  async moveTo(voxel) {
    this.viewer.moveTo(voxel, inScanner(voxel));
    await this.read(voxel);
  }

  /** Show what is at a voxel. */
  async read(voxel) {
    this.voxel = voxel;
    const index = voxel.reduceRight((sum, v, axis) => sum * this.viewer.size[axis] + v, 0);
    const mm = inScanner(voxel).slice(0, dims).map((v) => v.toFixed(1));
    const rows = [[dims < 3 ? "pixel" : "voxel", inFile(voxel).join(", ")]];
    if (!page.rowsDown) rows.unshift(["mm", mm.join(", ")]); // a photograph lies in no scanner
    const scan = this.viewer.scan;
    const count = this.viewer.size.slice(0, dims).reduce((a, b) => a * b, 1);
    const colours = scan.codes.length / count;
    const values = [...Array(colours).keys()].map((c) => scan.low + scan.step * scan.codes[index + c * count]);
    rows.push(["scan", values.map((v) => brief(v, 4)).join(", ") + (page.hounsfield ? " HU" : "")]);
    const map = await this.volume(this.choice.map, "map");
    const error = await this.volume(this.choice.map, "error");
    rows.push(["map", brief(map.step * map.codes[index], 4)]);
    if (error !== null) rows.push(["standard error", brief(error.step * error.codes[index], 4)]);
    if (this.viewer.label !== null) rows.push(["label", String(this.viewer.label.codes[index])]);
    byId("readout").replaceChildren(...rows.map(([name, text]) => {
      const [row, head, cell] = ["tr", "th", "td"].map((tag) => document.createElement(tag));
      head.textContent = name;
      cell.textContent = text;
      cell.id = `at-${name.replace(" ", "-")}`;
      row.append(head, cell);
      return row;
    }));
    this.showSlices();
  }

  /** The sliders of x, y and z run from left, posterior and inferior, whatever the file's axes do. */
  showSlices() {
    if (dims < 3) return;
    ["x", "y", "z"].forEach((name, place) => {
      const [axis, turned] = page.axes[place];
      const last = this.viewer.size[axis] - 1;
      byId(name).max = last;
      byId(name).value = turned ? last - this.voxel[axis] : this.voxel[axis];
      byId(`${name}-value`).textContent = `${inScanner(this.voxel)[place].toFixed(1)} mm`;
    });
  }

  /** Go some slices along x, y or z. */
  async step(place, slices) {
    byId("xyz"[place]).value = Number(byId("xyz"[place]).value) + slices;
    await this.slide(place);
  }

  async slide(place) {
    const [axis, turned] = page.axes[place];
    const value = Number(byId("xyz"[place]).value);
    const voxel = [...this.voxel];
    voxel[axis] = turned ? this.viewer.size[axis] - 1 - value : value;
    await this.moveTo(voxel);
  }

  /** The window's sliders cover the scan's own range. */
  get range() {
    const scan = this.viewer.scan;
    let [low, high] = [Infinity, -Infinity];
    for (const code of scan.codes) {
      if (code < low) low = code;
      if (code > high) high = code;
    }
    const found = [scan.low + scan.step * low, Math.max(scan.low + scan.step * high, scan.low + scan.step * low + 1e-6)];
    Object.defineProperty(this, "range", { value: found });
    return found;
  }

  setWindow(level, width) {
    const [low, high] = this.range;
    byId("level").value = (1000 * (level - low)) / (high - low);
    byId("width").value = 1000 * Math.sqrt(Math.min(1, width / (high - low)));
    this.window = [level, width];
    this.drawWindow();
  }

  slideWindow() {
    const [low, high] = this.range;
    const width = Math.max((high - low) * (byId("width").value / 1000) ** 2, (high - low) / 1e5);
    this.window = [low + ((high - low) * byId("level").value) / 1000, width];
    byId("window").value = "";
    this.drawWindow();
  }

  drawWindow() {
    const [level, width] = this.window;
    byId("level-value").textContent = brief(level);
    byId("width-value").textContent = brief(width);
    this.viewer.setWindow(level - width / 2, level + width / 2);
  }

  pickWindow() {
    const [low, high] = page.window;
    const preset = presets[byId("window").value];
    if (preset) this.setWindow(...preset);
    else this.setWindow((low + high) / 2, high - low);
  }
}

/** The picture as it is, on a canvas that is only printed. */
function drawForPrint(viewer) {
  const box = viewer.redraw();
  const [overlay, print] = [byId("contour"), byId("print")];
  [print.width, print.height] = [overlay.width, overlay.height];
  const pen = print.getContext("2d");
  pen.fillRect(0, 0, print.width, print.height);
  pen.drawImage(byId("stage"), ...box);
  pen.drawImage(overlay, 0, 0);
}

/** Keys and buttons: views, slices, cases, the convention, ratings. */
function connect(view, viewer, busy) {
  let axis = 2; // that the arrows go along
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => {
      for (const each of document.querySelectorAll("[data-view]")) each.setAttribute("aria-pressed", String(each === button));
      axis = { SAGITTAL: 0, CORONAL: 1 }[button.dataset.view] ?? 2;
      viewer.setView(button.dataset.view);
    });
  }
  const convention = byId("radiological");
  if (convention !== null) {
    convention.checked = store.get("radiological") === "true";
    const turn = () => {
      store.set("radiological", String(convention.checked));
      viewer.setRadiological(convention.checked);
    };
    convention.addEventListener("change", turn);
    turn();
  }
  const help = () => byId("keys").showModal();
  byId("help").addEventListener("click", help);
  const step = busy((slices) => view.step(axis, slices));
  const go = (name) => () => document.querySelector(`nav .${name}`)?.click();
  const keys = { "?": help, ArrowLeft: go("previous"), ArrowRight: go("next") };
  if (dims === 3) Object.assign(keys, { ArrowUp: () => step(1), ArrowDown: () => step(-1) });
  const own = (event) => {
    if (event.target.id === "stage") event.stopImmediatePropagation(); // the viewer has keys of its own
    if (event.type === "keyup" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input:not([type=checkbox]), select, dialog") || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  };
  for (const type of ["keydown", "keyup"]) globalThis.addEventListener(type, own, true);
  const known = ratings()[page.case] ?? {};
  for (const [id, value] of [["rating", known.rating], ["comment", known.comment]]) {
    byId(id).value = value ?? "";
    byId(id).addEventListener("input", () => rate(page.case, byId("rating").value, byId("comment").value));
  }
  byId("cohort").href += `#${store.get(`filters ${root}`) ?? ""}`;
  globalThis.addEventListener("beforeprint", () => drawForPrint(viewer));
}

function options(id, pairs) {
  byId(id).replaceChildren(...pairs.map(([value, words]) => new Option(words, value)));
}

async function main() {
  const viewer = await makeViewer(page, decode, colour);
  const view = new CasePage(viewer, []);
  const busy = (work) => async (...values) => {
    document.body.dataset.state = "busy";
    await work(...values);
    document.body.dataset.state = "ready";
  };
  options("scale", [["cohort", "the cohort's"], ["own", "this map's own"]]);
  byId("opacity").value = 600;
  const redraw = busy(() => view.draw());
  const choose = busy(async () => {
    await view.choose(byId("map").value);
    await view.moveTo([...page.maps[view.choice.map].focus]);
  });
  byId("map").addEventListener("change", choose);
  byId("scale").addEventListener("change", busy(() => view.choose(byId("map").value)));
  byId("threshold").addEventListener("input", redraw);
  byId("opacity").addEventListener("input", redraw);
  byId("chance")?.addEventListener("change", redraw);
  byId("outline")?.addEventListener("change", () => viewer.setOutline(byId("outline").checked));
  if (byId("window") !== null) {
    const known = page.hounsfield ? Object.keys(presets) : [];
    const words = (name) => `${name} (${presets[name].join(" / ")})`;
    options("window", [["auto", "as in the pictures"], ...known.map((name) => [name, words(name)]), ["", "your own"]]);
    byId("window").addEventListener("change", () => view.pickWindow());
    for (const id of ["level", "width"]) byId(id).addEventListener("input", () => view.slideWindow());
    view.pickWindow();
  }
  if (dims === 3) [0, 1, 2].forEach((i) => byId("xyz"[i]).addEventListener("input", busy(() => view.slide(i))));
  viewer.onMove = (mm) => view.read(dims === 3 ? shownAt(mm, viewer.size) : mm);
  connect(view, viewer, busy);
  const asked = /^#map=(\d+)$/.exec(location.hash);
  if (asked && Number(asked[1]) < page.maps.length) byId("map").value = asked[1];
  await choose();
}

main().catch((error) => {
  const words = document.createElement("p");
  words.className = "error";
  words.textContent = `This browser cannot show the volumes (${error.message}). A browser with WebGL 2 can.`;
  byId("frame").replaceChildren(words);
  document.body.dataset.state = "failed";
  throw error;
});
