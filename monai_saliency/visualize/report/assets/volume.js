// The viewer of volumes: NiiVue with the scan and the map, and the label's contour over it.
"use strict";

async function makeViewer(page, decode, colour) {
  const { DRAG_MODE, Niivue, NVImage, SLICE_TYPE } = niivue;
  const map = await decode(page.maps[0].volume);
  const viewer = {
    size: map.size,
    scan: await decode(page.scan),
    label: page.label === null ? null : await decode(page.label),
    onMove: () => {},
  };
  const nv = new Niivue({
    backColor: [0, 0, 0, 1],
    crosshairColor: [0.2, 0.9, 0.2, 0.9],
    crosshairWidthUnit: "mm",
    crosshairGap: 8, // of its own radius
    showAllOrientationMarkers: true,
    show3Dcrosshair: true,
    multiplanarLayout: 2,
    multiplanarShowRender: 1,
    multiplanarPadPixels: 4,
    fontColor: [0.8, 0.8, 0.8, 1],
    dragMode: DRAG_MODE.slicer3D, // the wheel goes through the slices, the right button zooms
    dragAndDropEnabled: false,
    logLevel: "error",
  });
  await nv.attachToCanvas(document.getElementById("stage"));

  const named = (name, codes) => ({ base64: codes, name: `${name}.nii.gz` });
  const scan = await NVImage.loadFromBase64({ ...named("scan", page.scan), colormap: "gray" });
  [scan.cal_min, scan.cal_max] = page.window;
  nv.addVolume(scan);

  // A colour map that takes strengths, the square roots of values: so it is linear, and 0 is clear.
  const scaleOf = (negative) => {
    const found = { R: [], G: [], B: [], A: [], I: [] };
    for (let i = 0; i < 256; i += 5) {
      const [red, green, blue] = colour(i / 255, negative);
      // At the rim colours are blended with that of 0, which must not show the other sign.
      for (const [name, value] of [["R", red], ["G", green], ["B", blue]]) found[name].push(i ? value : 128);
      found.A.push(i ? 255 : 0);
      found.I.push(i);
      if (!i) {
        for (const [name, value] of Object.entries({ R: red, G: green, B: blue, A: 255, I: 1 })) found[name].push(value);
      }
    }
    return found;
  };
  nv.addColormap("for", scaleOf(false));
  nv.addColormap("against", scaleOf(true));
  const full = 32767;
  const overlay = await NVImage.loadFromBase64({
    ...named("map", page.maps[0].volume), colormap: "for", colormapNegative: "against", cal_min: 0, cal_max: 1,
  });
  overlay.hdr.scl_slope = 1 / full;
  overlay.hdr.scl_inter = 0;
  overlay.img = new Int16Array(overlay.img.length);
  [overlay.cal_min, overlay.cal_max] = [0, 1];
  nv.addVolume(overlay);

  // The contour is drawn after each scene, on a canvas of its own.
  const sheet = document.getElementById("contour");
  let isOutlined = true;
  const drawContours = () => {
    const pen = emptied(sheet, nv.canvas.width, nv.canvas.height);
    if (viewer.label === null || !isOutlined) return;
    nv.screenSlices.forEach((tile, i) => {
      if (tile.axCorSag <= SLICE_TYPE.SAGITTAL) drawContour(pen, tile.leftTopWidthHeight, i);
    });
  };
  const drawContour = (pen, [left, top, width, height], i) => {
    // Places inside the tile: at its edges rounding can lie outside.
    const share = (x, y) => Array.from(nv.screenXY2TextureFrac(left + x * width, top + y * height, i, false));
    const [first, across, down] = [share(0.25, 0.25), share(0.75, 0.25), share(0.25, 0.75)];
    // Of x, y and z: which runs across, which down, and which is the slice's own.
    const along = (end) => [0, 1, 2].reduce((a, b) => (Math.abs(end[b] - first[b]) > Math.abs(end[a] - first[a]) ? b : a));
    const [h, v] = [along(across), along(down)];
    const sizes = page.axes.map(([axis]) => viewer.size[axis]);
    const fixed = 3 - h - v;
    const slice = Math.min(sizes[fixed] - 1, Math.max(0, Math.floor(first[fixed] * sizes[fixed])));
    const at = (x, y) => {
      if (x < 0 || y < 0 || x >= sizes[h] || y >= sizes[v]) return 0;
      const place = { [h]: x, [v]: y, [fixed]: slice };
      const voxel = [0, 0, 0];
      page.axes.forEach(([axis, isTurned], p) => { voxel[axis] = isTurned ? sizes[p] - 1 - place[p] : place[p]; });
      return viewer.label.codes[voxel[0] + viewer.size[0] * (voxel[1] + viewer.size[1] * voxel[2])];
    };
    contour(pen, sizes[h], sizes[v], at, (x, y) => [
      left + (0.25 + (x / sizes[h] - first[h]) / (across[h] - first[h]) / 2) * width,
      top + (0.25 + (y / sizes[v] - first[v]) / (down[v] - first[v]) / 2) * height,
    ]);
  };
  const drawScene = nv.drawScene.bind(nv);
  nv.drawScene = (...given) => {
    const found = drawScene(...given);
    drawContours();
    return found;
  };
  nv.setSliceType(SLICE_TYPE.MULTIPLANAR);
  // Lines of the crosshair are solids in mm: thinner than a pixel, parts of them would be missing.
  const [wide, deep, tall] = page.axes.map(([axis]) => viewer.size[axis] * page.stride[axis] * page.spacing[axis]);
  new ResizeObserver(([{ contentRect: { width, height } }]) => {
    const pixel = Math.max((wide + deep) / width, (deep + tall) / height);
    nv.setCrosshairWidth(1.6 * pixel);
    requestAnimationFrame(() => nv.drawScene()); // and the contours with it
  }).observe(nv.canvas);
  nv.setRenderAzimuthElevation(120, 15);

  let isMoving = false;
  nv.onLocationChange = (location) => {
    if (!isMoving) viewer.onMove(Array.from(location.mm).slice(0, 3));
  };
  viewer.setMap = (strengths, opacity) => {
    for (let i = 0; i < strengths.length; i++) overlay.img[i] = Math.round(full * strengths[i]);
    overlay.opacity = opacity;
    nv.updateGLVolume();
  };
  viewer.setWindow = (low, high) => {
    [scan.cal_min, scan.cal_max] = [low, high];
    nv.updateGLVolume();
  };
  viewer.setOutline = (isShown) => {
    isOutlined = isShown;
    drawContours();
  };
  viewer.setView = (name) => nv.setSliceType(SLICE_TYPE[name]);
  viewer.setRadiological = (isRadiological) => nv.setRadiologicalConvention(isRadiological);
  viewer.redraw = () => {
    nv.drawScene();
    return [0, 0, sheet.width, sheet.height];
  };
  viewer.moveTo = (voxel, mm) => {
    isMoving = true;
    nv.scene.crosshairPos = nv.mm2frac(mm, 0, true);
    nv.drawScene();
    isMoving = false;
  };
  viewer.nv = nv;
  globalThis.viewer = viewer;
  return viewer;
}
