"""From the name of a model to something that can be exported: the model itself, and inputs to try it with.

The command line is built on these; they are as useful from Python::

    from polyport.samples import load_model, sample_inputs

    model, task = load_model("path/or/hub-id")
    inputs, processor = sample_inputs(model, "path/or/hub-id", task)
"""

from polyport.samples.loading import load_model
from polyport.samples.processors import Processors, load_processors
from polyport.samples.prompts import fit_prompt, prompt_inputs
from polyport.samples.reading import read_inputs
from polyport.samples.sampling import add_decoder_inputs, decoder_start, fit_inputs, sample_inputs
from polyport.samples.source import check_source

__all__ = [
    "Processors",
    "add_decoder_inputs",
    "check_source",
    "decoder_start",
    "fit_inputs",
    "fit_prompt",
    "load_model",
    "load_processors",
    "prompt_inputs",
    "read_inputs",
    "sample_inputs",
]
