// Single linear operations on stored matrices, for tests and tools: each call packs its weights. The engine's path is
// program.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/registry.h"
#include "core/dispatch.h"
#include "core/fpu.h"
#include "core/memory.h"
#include "core/packing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <typename T, int kDimensions>
using Array = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

template <typename T>
struct NumpyMatrix {
  T* data;
  nb::ndarray<nb::numpy, T, nb::ndim<2>> array;
};

template <typename T>
NumpyMatrix<T> new_matrix(int64_t rows, int64_t columns) {
  T* data = new T[std::max<int64_t>(rows * columns, 1)]();
  const nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<T*>(pointer); });
  return {data, {data, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner}};
}

// A stored matrix, packed into memory of its own.
class PackedWeight {
 public:
  PackedWeight(const std::string& format_name, bool float32, int64_t n, int64_t k, const Array<uint8_t, 1>& raw)
      : format_(stored_format(format_name)), matrix_(describe_packed(format_, float32, n, k)) {
    const int64_t row_bytes = stored_row_bytes(format_, k);
    const int64_t given = static_cast<int64_t>(raw.shape(0));
    if (given % row_bytes != 0 || given / row_bytes != n) {
      throw std::invalid_argument("a " + format_name + " matrix of " + std::to_string(n) + " rows needs " +
                                  std::to_string(row_bytes) + " bytes per row, got " + std::to_string(given) +
                                  " bytes in all");
    }
    memory_ = Mapping(packed_bytes(matrix_), Mapping::Pages::kOrdinary);
    pack_panels(matrix_, format_, raw.data(), 0, num_panels(matrix_), memory_.data());
    matrix_.data = memory_.data();
  }

  const PackedMatrix& matrix() const { return matrix_; }

 private:
  StoredFormat format_;
  PackedMatrix matrix_;
  Mapping memory_;
};

// The rows of x in the form that the packing multiplies with.
class Prepared {
 public:
  Prepared(const Kernels& kernels, Packing packing, const Array<float, 2>& x)
      : rows_(static_cast<int64_t>(x.shape(0))), k_(static_cast<int64_t>(x.shape(1))), x_(x.data()) {
    switch (packing) {
      case Packing::kF32:
        break;
      case Packing::kBF16:
        bf16_.resize(rows_ * k_);
        for (int64_t r = 0; r < rows_; ++r) kernels.to_bf16_row(x_ + r * k_, k_, bf16_.data() + r * k_);
        break;
      case Packing::kU4:
      case Packing::kU8:
        blocks_.resize(rows_ * (k_ / kQuantBlock));
        for (int64_t r = 0; r < rows_; ++r)
          kernels.quantize_row(x_ + r * k_, k_, blocks_.data() + r * (k_ / kQuantBlock));
        break;
    }
  }

  Activations activations(Packing packing) const {
    const void* values = x_;
    if (packing == Packing::kBF16) values = bf16_.data();
    if (packing == Packing::kU4 || packing == Packing::kU8) values = blocks_.data();
    return {rows_, k_, values};
  }

  const std::vector<QuantBlock>& blocks() const { return blocks_; }

 private:
  int64_t rows_, k_;
  const float* x_;
  std::vector<uint16_t> bf16_;
  std::vector<QuantBlock> blocks_;
};

nb::object multiply(const std::string& isa, const std::string& format, const Array<uint8_t, 1>& raw, int64_t n,
                    int64_t k, const Array<float, 2>& x, bool float32, const std::optional<Array<float, 1>>& bias) {
  const Kernels& kernels = kernels_for(isa);
  if (static_cast<int64_t>(x.shape(1)) != k) {
    throw std::invalid_argument("x has " + std::to_string(x.shape(1)) + " columns, expected k = " + std::to_string(k));
  }
  if (bias && static_cast<int64_t>(bias->shape(0)) != n) {
    throw std::invalid_argument("bias has " + std::to_string(bias->shape(0)) +
                                " entries, expected n = " + std::to_string(n));
  }
  const PackedWeight weight(format, float32, n, k, raw);
  const PackedMatrix& matrix = weight.matrix();
  auto out = new_matrix<float>(static_cast<int64_t>(x.shape(0)), n);
  {
    const KernelFpu fpu;
    const Prepared prepared(kernels, matrix.packing, x);
    const LinearArgs args{matrix, prepared.activations(matrix.packing), bias ? bias->data() : nullptr, out.data, n};
    kernels.linear(args, 0, num_panels(matrix));
  }
  return nb::cast(out.array);
}

nb::tuple quantize_rows(const std::string& isa, const Array<float, 2>& x) {
  const Kernels& kernels = kernels_for(isa);
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  const int64_t k = static_cast<int64_t>(x.shape(1));
  if (k % kQuantBlock != 0) {
    throw std::invalid_argument("rows of " + std::to_string(k) + " values; expected a multiple of " +
                                std::to_string(kQuantBlock));
  }
  auto values = new_matrix<int8_t>(rows, k);
  auto scales = new_matrix<float>(rows, k / kQuantBlock);
  auto sums = new_matrix<float>(rows, k / kQuantBlock);
  const KernelFpu fpu;
  const Prepared prepared(kernels, Packing::kU8, x);
  for (size_t i = 0; i < prepared.blocks().size(); ++i) {
    const QuantBlock& block = prepared.blocks()[i];
    std::memcpy(values.data + i * kQuantBlock, block.values, kQuantBlock);
    scales.data[i] = block.scale;
    sums.data[i] = block.sum;
  }
  return nb::make_tuple(values.array, scales.array, sums.array);
}

nb::object unpack(const std::string& format, const Array<uint8_t, 1>& raw, int64_t n, int64_t k, bool float32) {
  const PackedWeight weight(format, float32, n, k, raw);
  auto out = new_matrix<float>(n, k);
  for (int64_t row = 0; row < n; ++row) unpack_row(weight.matrix(), row, out.data + row * k);
  return nb::cast(out.array);
}

}  // namespace

void register_linear(nb::module_& m) {
  m.def("linear", &multiply, "isa"_a, "format"_a, "raw"_a.noconvert(), "n"_a, "k"_a, "x"_a.noconvert(), nb::kw_only(),
        "float32"_a = false, "bias"_a.noconvert() = nb::none(),
        "x [M, k] times the stored matrix [n, k] transposed, plus bias [n], by one instruction set's kernels: float32 "
        "[M, n].\n\n"
        "raw: the matrix in format ('q4_1', ...), uint8. float32: keep unquantized weights in float32 instead of "
        "bfloat16.\n"
        "Raises ValueError for unknown names and sizes that do not fit.");
  m.def(
      "quantize_rows", &quantize_rows, "isa"_a, "x"_a.noconvert(),
      "x [M, k] as 8-bit blocks of 32: (int8 values [M, k], scales [M, k / 32], scale * sum of values [M, k / 32]).\n\n"
      "Raises ValueError unless k is a multiple of 32.");
  m.def("unpack", &unpack, "format"_a, "raw"_a.noconvert(), "n"_a, "k"_a, nb::kw_only(), "float32"_a = false,
        "The stored matrix packed and dequantized row by row, as embeddings are read: float32 [n, k].");
}

}  // namespace octavo
