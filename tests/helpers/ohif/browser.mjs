// In a page: the scan's voxels too, as the loader decodes them, and the map as OHIF's volume over the scan.
import { imageLoader, init as initCore, volumeLoader } from '@cornerstonejs/core';
import { init as initLoader, wadouri } from '@cornerstonejs/dicom-image-loader';
import { read } from './read.mjs';

window.readByViewer = async (slices, map, segmentation) => {
  initCore();
  initLoader({ maxWebWorkers: 1, useLegacyMetadataProvider: true });
  const load = async url => (await fetch(url)).arrayBuffer();
  const buffers = await Promise.all([...slices, map, segmentation].map(load));
  const files = slices.map((_, i) => wadouri.fileManager.add(new Blob([buffers[i]])));
  const found = await read(files.map((id, i) => [id.split(':')[1], buffers[i]]), ...buffers.slice(-2));
  await Promise.all(found.imageIds.map(id => imageLoader.loadAndCacheImage(id)));
  const scan = await volumeLoader.createAndCacheVolumeFromImages('scan', found.imageIds);
  const over = volumeLoader.createAndCacheDerivedVolume('scan', {
    volumeId: 'map',
    targetBuffer: { type: found.map.constructor.name },
  });
  over.voxelManager.setCompleteScalarDataArray(found.map);
  const { dimensions, spacing, origin } = over;
  const voxels = volume => Array.from(volume.voxelManager.getCompleteScalarDataArray());
  return {
    ...found,
    ...{ dimensions, spacing, origin, direction: Array.from(over.direction), map: voxels(over), scan: voxels(scan) },
  };
};
