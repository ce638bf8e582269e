// The viewer of 2D images: a canvas with a pixel for each pixel of the scan.
"use strict";

async function makeViewer(page, decode, colour) {
  const map = await decode(page.maps[0].volume);
  const [columns, rows] = map.size;
  const viewer = {
    size: map.size,
    scan: await decode(page.scan),
    label: page.label === null ? null : await decode(page.label),
    onMove: () => {},
  };
  // A thousand steps of each scale.
  const tables = [false, true].map((negative) => Array.from({ length: 1001 }, (_, i) => colour(i / 1000, negative)));
  const [canvas, frame] = [document.getElementById("stage"), document.getElementById("frame")];
  [canvas.width, canvas.height] = [columns, rows];
  const [dx, dy] = [0, 1].map((axis) => page.spacing[axis] * page.stride[axis]);
  canvas.style.aspectRatio = `${columns * dx} / ${rows * dy}`;
  // The longer side fills the frame.
  const fit = () => {
    const wide = (frame.clientWidth * rows * dy) / (columns * dx) <= frame.clientHeight;
    canvas.style.width = wide ? "100%" : "auto";
    canvas.style.height = wide ? "auto" : "100%";
  };
  new ResizeObserver(fit).observe(frame);
  const pen = canvas.getContext("2d");
  const state = { strengths: new Float32Array(columns * rows), opacity: 0.6, window: [0, 255], outline: true };
  // From a line of the canvas to the scan's row, and back.
  const turned = (line) => (page.rowsDown ? line : rows - 1 - line);

  function draw() {
    const image = pen.createImageData(columns, rows);
    const [low, high] = state.window;
    const scan = viewer.scan;
    const isColour = scan.codes.length === 3 * columns * rows;
    for (let line = 0, out = 0; line < rows; line++) {
      for (let x = 0; x < columns; x++, out += 4) {
        const i = x + columns * turned(line);
        const strength = state.strengths[i];
        const hue = strength === 0 ? null : tables[strength < 0 ? 1 : 0][Math.round(1000 * Math.abs(strength))];
        for (let c = 0; c < 3; c++) {
          let value;
          if (isColour) value = scan.codes[i + c * columns * rows];
          else value = (255 * (scan.low + scan.step * scan.codes[i] - low)) / (high - low);
          value = Math.min(255, Math.max(0, value));
          if (hue !== null) value += state.opacity * (hue[c] - value);
          image.data[out + c] = value;
        }
        image.data[out + 3] = 255;
      }
    }
    pen.putImageData(image, 0, 0);
  }

  viewer.setMap = (strengths, opacity) => {
    Object.assign(state, { strengths, opacity });
    draw();
  };
  viewer.setWindow = (low, high) => {
    state.window = [low, high];
    draw();
  };
  viewer.setOutline = (isShown) => {
    state.outline = isShown;
    drawContour();
  };
  viewer.moveTo = ([x, y]) => {
    const [across, down] = [document.getElementById("across"), document.getElementById("down")];
    const place = () => {
      const [left, top] = [canvas.offsetLeft, canvas.offsetTop];
      Object.assign(across.style, {
        top: `${top + ((turned(y) + 0.5) / rows) * canvas.offsetHeight}px`, left: `${left}px`, width: `${canvas.offsetWidth}px`,
      });
      Object.assign(down.style, {
        left: `${left + ((x + 0.5) / columns) * canvas.offsetWidth}px`, top: `${top}px`, height: `${canvas.offsetHeight}px`,
      });
    };
    place();
    viewer.place = place;
  };
  new ResizeObserver(() => viewer.place?.()).observe(canvas);
  const follow = (event) => {
    if (event.buttons !== 1) return;
    const box = canvas.getBoundingClientRect();
    const at = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const x = at((event.clientX - box.left) / box.width, columns);
    const y = turned(at((event.clientY - box.top) / box.height, rows));
    viewer.moveTo([x, y]);
    viewer.onMove([x, y]);
  };
  const overlay = document.getElementById("contour");
  let box = [0, 0, 0, 0]; // of the scan on the overlay
  const drawContour = () => {
    const dense = globalThis.devicePixelRatio;
    if (!frame.clientWidth || !canvas.offsetWidth) return; // while it is printed
    const pen = emptied(overlay, Math.round(frame.clientWidth * dense), Math.round(frame.clientHeight * dense));
    box = [canvas.offsetLeft, canvas.offsetTop, canvas.offsetWidth, canvas.offsetHeight].map((v) => v * dense);
    if (viewer.label === null || !state.outline) return;
    const at = (x, y) => (x < 0 || y < 0 || x >= columns || y >= rows ? 0 : viewer.label.codes[x + columns * turned(y)]);
    contour(pen, columns, rows, at, (x, y) => [
      box[0] + (x / columns) * box[2], box[1] + (y / rows) * box[3],
    ]);
  };
  new ResizeObserver(drawContour).observe(canvas);
  viewer.redraw = () => box;
  canvas.addEventListener("pointerdown", follow);
  canvas.addEventListener("pointermove", follow);
  globalThis.viewer = viewer;
  return viewer;
}
