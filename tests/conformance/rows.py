"""The samples of all rows, and what some of them lack."""

OPSETS = (17, 21, 26)
# fmt: off
HELD = {  # rows over sequences and optionals
    "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
    "SplitToSequence", "triplane.SequenceMap",
}
SLOPED = {
    "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert",
    "SplitToSequence",
}
DRAWN = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
}
MISSING = {  # rows, or uses of them, that an opset lacks and that have no other form in it
    17: {
        "BitCast", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "RegexFullMatch",
        "ScatterElements-3", "ScatterElements-4", "ScatterND-3", "ScatterND-4", "StringConcat",
        "StringSplit", "triplane.Threefry2x32",
    },
    21: {"BitCast"},
    26: set(),
}
NO_GRADIENT = {
    "And", "ArgMax", "ArgMin",
    "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "Constant", "ConstantOfShape",
    "DequantizeLinear",
    "Equal",
    "Greater", "GreaterOrEqual",
    "IsInf", "IsNaN",
    "Less", "LessOrEqual",
    "NonMaxSuppression", "NonZero", "Not",
    "Or",
    "QuantizeLinear",
    "Shape", "Size",
    "Xor",
    "triplane.Dims",
} | (HELD - SLOPED) | DRAWN | {
    "BlackmanWindow", "HammingWindow", "HannWindow", "ImageDecoder", "MelWeightMatrix",
    "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
    "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul",
}
FLAT = {  # slope 0 where there is one
    "Ceil", "EyeLike", "Floor", "Hardmax", "Round", "Sign", "triplane.StopGradient",
}
INTEGERS = {"triplane.Threefry2x32"}  # a body of integer rows: nothing to differentiate
NO_SYMBOL = {  # literal sizes, axes of size 1, literals only
    "AffineGrid-0", "AffineGrid-1", "AffineGrid-2",
    "ConstantOfShape-0", "ConstantOfShape-1", "ConstantOfShape-2", "Expand-0", "MaxUnpool-1",
    "QuantizeLinear-1", "Range-0", "Range-1", "Range-2", "Range-3", "Split-0", "Squeeze-0",
    "Squeeze-1", "triplane.Threefry2x32-1",
} | {f"{w}Window-{k}" for w in ("Blackman", "Hamming", "Hann") for k in range(4)} | {
    "MelWeightMatrix-0", "MelWeightMatrix-1",
}
REFUSED_BY_XLA = {  # strings, and sizes that only the data decide
    "Compress", "NonMaxSuppression", "NonZero", "RegexFullMatch", "StringConcat",
    "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique",
    "BlackmanWindow-3", "ConstantOfShape-2", "HammingWindow-3", "HannWindow-3", "OneHot-3",
    "Range-2", "Range-3", "Reshape-2", "RoiAlign-2", "RoiAlign-4", "Slice-6", "Split-3",
    "Squeeze-2", "Tile-3", "TopK-4", "Unsqueeze-1",
}
NO_RULE_FOR_XLA = HELD | DRAWN | {  # rows that no function for XLA may have
    "Compress", "ImageDecoder", "NonMaxSuppression", "NonZero", "RegexFullMatch", "StringConcat",
    "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique",
}


def ids(uses):
    return [str(use) for use in uses]
