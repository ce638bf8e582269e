// node node.mjs FOLDER MAP SEGMENTATION: prints what is read as JSON.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { metaData } from '@cornerstonejs/core';
import { wadouri } from '@cornerstonejs/dicom-image-loader';
import { read } from './read.mjs';

globalThis.navigator ??= { platform: 'Linux' }; // before Node 21
const bytes = path => new Uint8Array(readFileSync(path)).buffer;
const [folder, map, segmentation] = process.argv.slice(2);
metaData.addProvider(wadouri.metaData.metaDataProvider);
read(readdirSync(folder).map(name => [name, bytes(join(folder, name))]), bytes(map), bytes(segmentation)).then(found =>
  console.log(JSON.stringify({ ...found, map: Array.from(found.map) })),
);
