"""A module of 3D Slicer that explains the loaded scan: which part of it made the network say that?

Slicer's own Python needs no torch: the explanation runs in another Python that has monai-saliency, in a process of its
own. In Slicer: Edit, Application Settings, Modules, Additional module paths: add this file's folder, and restart.
"""

import csv
import logging
import shlex
import tempfile
from pathlib import Path

import ctk
import qt
import slicer
import vtk
from slicer.ScriptedLoadableModule import (
    ScriptedLoadableModule,
    ScriptedLoadableModuleLogic,
    ScriptedLoadableModuleWidget,
)

COLOURS = "vtkMRMLColorTableNodeFileDivergingBlueRed.txt"


class MonaiSaliency(ScriptedLoadableModule):
    """What Slicer lists."""

    def __init__(self, parent):
        ScriptedLoadableModule.__init__(self, parent)
        self.parent.title = "Saliency map (MONAI)"
        self.parent.categories = ["Machine Learning"]
        self.parent.contributors = ["monai-saliency"]
        self.parent.helpText = "Shows which part of the scan made a MONAI network say what it says."


class MonaiSaliencyWidget(ScriptedLoadableModuleWidget):
    """The panel: the scan, the Python, the bundle and its flags, and the threshold of what is shown."""

    def setup(self):
        ScriptedLoadableModuleWidget.setup(self)
        self.logic, self.map = MonaiSaliencyLogic(), None
        settings, form = qt.QSettings(), qt.QFormLayout()
        self.layout.addLayout(form)
        self.scan = slicer.qMRMLNodeComboBox()
        self.scan.nodeTypes = ["vtkMRMLScalarVolumeNode"]
        self.scan.addEnabled = self.scan.removeEnabled = False
        self.scan.setMRMLScene(slicer.mrmlScene)
        form.addRow("Scan", self.scan)
        self.texts = {}
        for name, hint in (
            ("Python", "the Python that has monai-saliency, such as /env/bin/python"),
            ("Bundle", "the folder of a MONAI bundle; empty for the demo's"),
            ("Flags", "of the bundle, such as --method rise --num_masks 1000"),
        ):
            self.texts[name] = qt.QLineEdit(settings.value(f"MonaiSaliency/{name}") or "")
            self.texts[name].placeholderText = hint
            form.addRow(name, self.texts[name])
        self.button = qt.QPushButton("Explain")
        self.button.connect("clicked()", self.explain)
        form.addRow(self.button)
        self.threshold = ctk.ctkSliderWidget()
        self.threshold.maximum, self.threshold.singleStep, self.threshold.value = 1, 0.01, 0.3
        self.threshold.connect("valueChanged(double)", self.show)
        form.addRow("Show from this share of the largest value", self.threshold)
        self.opposing = qt.QCheckBox("what opposes the score, instead of what supports it")
        self.opposing.connect("toggled(bool)", self.show)
        form.addRow(self.opposing)
        self.words = qt.QLabel()
        self.words.wordWrap = True
        form.addRow(self.words)

    def explain(self):
        """Explain the chosen scan, and show its map."""
        settings = qt.QSettings()
        for name, text in self.texts.items():
            settings.setValue(f"MonaiSaliency/{name}", text.text)
        python, bundle, flags = (text.text for text in self.texts.values())
        self.button.enabled = False
        try:
            with slicer.util.tryWithErrorDisplay("No map was made"):
                self.map, self.words.text = self.logic.explain(self.scan.currentNode(), python, bundle, flags)
                self.show()
        finally:
            self.button.enabled = True

    def show(self, *_):
        """Show the map as the panel says."""
        if self.map is not None:
            self.logic.show(self.map, self.threshold.value, self.opposing.checked)


class MonaiSaliencyLogic(ScriptedLoadableModuleLogic):
    """Explains a volume in another process, and shows its map."""

    def explain(self, scan, python, bundle="", flags=""):
        """Explain a scalar volume; returns the map, a volume on the same grid, and the verdict in words."""
        if scan is None or not python:
            raise ValueError("choose a scan, and a Python that has monai-saliency")
        with tempfile.TemporaryDirectory() as folder:
            # Model Zoo bundles read imagesTs, ours any folder.
            file = Path(folder, "scans", "imagesTs", "scan.nii.gz")
            file.parent.mkdir(parents=True)
            if not slicer.util.exportNode(scan, str(file), world=False):
                raise RuntimeError(f"Slicer could not write {scan.GetName()} as NIfTI")
            output = Path(folder, "maps")
            command = self.command(python, bundle, flags, file.parents[1], output)
            self._run(command, cwd=bundle or None)  # where a bundle's own `scripts` are found
            maps = sorted(output.glob("**/*_saliency.nii.gz"))
            if len(maps) != 1:
                raise RuntimeError(f"the run made {len(maps)} maps, 1 is expected: see the Python console")
            found = slicer.util.loadVolume(str(maps[0]), {"name": f"{scan.GetName()} saliency"})
            rows = [
                row for path in output.glob("**/summary.csv") for row in csv.DictReader(path.open(encoding="utf-8"))
            ]
        self._check(scan, found)
        found.SetAndObserveTransformNodeID(scan.GetTransformNodeID())
        slicer.util.setSliceViewerLayers(background=scan, foreground=found, foregroundOpacity=0.5)
        return found, "\n".join(f"class {row['class']} scores {row['score']}. {row['verdict']}" for row in rows)

    def command(self, python, bundle, flags, scans, output):
        """The words of the command that explains the scans of a folder."""
        if bundle:
            overlay = self._run([python, "-m", "monai_saliency", "overlay", "explain"])
            config = next(path for path in sorted(Path(bundle, "configs").glob("inference.*")))
            words = ["explain", "--config_file", f"['{config.as_posix()}', '{Path(overlay).as_posix()}']"]
            words += ["--saliency_dir", str(output), "--saliency_picture", "false", "--saliency_report", "false"]
        else:
            bundle = self._run([python, "-m", "monai_saliency", "bundle"])
            words = ["--config_file", str(Path(bundle, "configs", "inference.yaml")), "--output_dir", str(output)]
            words += ["--picture", "false", "--report", "false"]
        words += ["--bundle_root", str(bundle), "--dataset_dir", str(scans), *shlex.split(flags)]
        return [python, "-m", "monai.bundle", "run", *words]

    def _run(self, command, cwd=None):
        """Run a command without Slicer's own environment, which is for Slicer's Python; returns its last line."""
        process, lines = slicer.util.launchConsoleProcess(command, useStartupEnvironment=True, cwd=cwd), []
        for line in process.stdout:
            lines.append(line.rstrip())
            logging.info(lines[-1])
            slicer.app.processEvents()
        if process.wait():
            raise RuntimeError(f"{shlex.join(command)}\nfailed:\n" + "\n".join(lines[-5:]))
        return lines[-1] if lines else ""

    def _check(self, scan, found):
        """Refuse a map that does not lie on the scan, such as for sheared axes, which Slicer's NIfTI cannot hold."""
        places = [slicer.util.arrayFromVTKMatrix(self._matrix(volume)) for volume in (scan, found)]
        shapes = [tuple(volume.GetImageData().GetDimensions()) for volume in (scan, found)]
        if shapes[0] != shapes[1] or abs(places[0] - places[1]).max() > 1e-3:
            slicer.mrmlScene.RemoveNode(found)
            raise RuntimeError(f"the map does not lie on the scan (shapes {shapes}), so it is not shown")

    def _matrix(self, volume):
        matrix = vtk.vtkMatrix4x4()
        volume.GetIJKToRASMatrix(matrix)
        return matrix

    def show(self, found, share=0.3, opposing=False):
        """Colour a map, red where it supports the score and blue where it opposes it, and hide what is below a share of
        its largest absolute value.
        """
        peak = max(map(abs, found.GetImageData().GetScalarRange())) or 1.0
        display = found.GetDisplayNode()
        display.SetAndObserveColorNodeID(COLOURS)
        display.AutoWindowLevelOff()
        display.SetWindowLevelMinMax(-peak, peak)
        display.AutoThresholdOff()
        display.SetThreshold(*((-peak, -share * peak) if opposing else (share * peak, peak)))
        display.ApplyThresholdOn()
