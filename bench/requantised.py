"""Writes the shipped model, or another .gguf file, with its matrices in another format: formats on one model.

Run: python bench/requantised.py FORMAT OUT [--model FILE.gguf], as Q8_0 /tmp/q8_0.gguf. Metadata and norms stay.
Matrices are dequantised and rounded to nearest by the gguf package, so the weights are worse than those of a file that
was made from floats; what a program makes of them can be compared with float32 arithmetic on the same ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from outpace.models.files.find import shipped_model

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "F32")
OWN = ("general.architecture",)  # fields that the writer has written


def copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    """All fields but the writer's own."""
    for field in reader.fields.values():
        if field.name in OWN or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)


def rounded(kind: GGMLQuantizationType, values: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] in this format."""
    return values if kind.name == "F32" else quants.quantize(values, kind)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="the shipped model by default")
    asked = parser.parse_args()
    reader = GGUFReader(asked.model or shipped_model())
    architecture = reader.fields["general.architecture"].contents()
    writer, kind = GGUFWriter(asked.out, architecture), GGMLQuantizationType[asked.format]
    copy_metadata(reader, writer)
    block = GGML_QUANT_SIZES[kind][0]
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_matrix = len(tensor.shape) == 2 and values.shape[-1] % block == 0
        own = kind if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, rounded(own, values), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
