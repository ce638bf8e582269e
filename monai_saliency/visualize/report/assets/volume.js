// The viewer of volumes: NiiVue with the scan, the map and the label's outline.
"use strict";

async function makeViewer(page, decode, colour) {
  const { Niivue, NVImage, SLICE_TYPE } = niivue;
  const map = await decode(page.maps[0].volume);
  const viewer = {
    size: map.size,
    scan: page.scan === null ? null : await decode(page.scan),
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
    dragMode: 3,
    dragAndDropEnabled: false,
    logLevel: "error",
  });
  await nv.attachToCanvas(document.getElementById("stage"));

  const named = (name, codes) => ({ base64: codes, name: `${name}.nii.gz` });
  const scan = await NVImage.loadFromBase64({ ...named("scan", page.scan ?? page.maps[0].volume), colormap: "gray" });
  if (page.scan === null) scan.img = new Int16Array(scan.img.length);
  [scan.cal_min, scan.cal_max] = page.scan === null ? [0, 1] : page.window;
  nv.addVolume(scan);

  // A colour map that takes strengths, the square roots of values: so it is linear, and 0 is clear.
  const scaleOf = (negative) => {
    const found = { R: [], G: [], B: [], A: [], I: [] };
    for (let i = 0; i < 256; i += 5) {
      const [red, green, blue] = colour(i / 255, negative);
      found.R.push(red);
      found.G.push(green);
      found.B.push(blue);
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

  let outline = null;
  if (viewer.label !== null) {
    nv.addColormap("outline", { R: [255, 255, 255], G: [255, 255, 255], B: [255, 255, 255], A: [0, 255, 255], I: [0, 1, 255] });
    outline = await NVImage.loadFromBase64({
      ...named("label", page.label), colormap: "outline", cal_min: 0, cal_max: 1, opacity: 0.75,
    });
    outline.img = rim(viewer.label);
    outline.hdr.scl_slope = 1;
    [outline.cal_min, outline.cal_max] = [0, 1];
    nv.addVolume(outline);
  }
  nv.setSliceType(SLICE_TYPE.MULTIPLANAR);
  // Lines of the crosshair are solids in mm: thinner than a pixel, parts of them would be missing.
  const [wide, deep, tall] = page.axes.map(([axis]) => viewer.size[axis] * page.stride[axis] * page.spacing[axis]);
  new ResizeObserver(([{ contentRect: { width, height } }]) => {
    const pixel = Math.max((wide + deep) / width, (deep + tall) / height);
    nv.setCrosshairWidth(1.6 * pixel);
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
    if (outline === null) return;
    outline.opacity = isShown ? 0.75 : 0;
    nv.updateGLVolume();
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

/** The voxels of a label that touch another label. */
function rim({ size: [nx, ny, nz], codes }) {
  const found = new Uint8Array(codes.length);
  const steps = [[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]];
  for (let z = 0, i = 0; z < nz; z++) {
    for (let y = 0; y < ny; y++) {
      for (let x = 0; x < nx; x++, i++) {
        if (!codes[i]) continue;
        found[i] = steps.some(([a, b, c]) => {
          const [p, q, r] = [x + a, y + b, z + c];
          if (p < 0 || q < 0 || r < 0 || p >= nx || q >= ny || r >= nz) return true;
          return codes[p + nx * (q + ny * r)] !== codes[i];
        }) ? 1 : 0;
      }
    }
  }
  return found;
}
