// Packing and linear kernels at the edges of their buffers, which are exactly as large as promised, for the sanitizers
// to watch: any split into panel ranges and into rows gives the same bits and writes nothing else.
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "core/dispatch.h"
#include "core/fpu.h"
#include "core/packing.h"
#include "kernels/half.h"

namespace {

using namespace octavo;

struct Case {
  const char* format;
  bool float32;
  int64_t n, k;

  std::string name() const {
    return std::string(format) + (float32 ? " as f32 " : " ") + std::to_string(n) + " x " + std::to_string(k);
  }
};

// Random stored bytes whose scales and floats are ordinary numbers. `new` keeps the buffer exact, at an odd address.
class Stored {
 public:
  Stored(const Case& c, std::mt19937& rng)
      : format(stored_format(c.format)), bytes_(c.n * stored_row_bytes(format, c.k)) {
    memory_ = std::make_unique<uint8_t[]>(bytes_ + 1);
    std::normal_distribution<float> normal;
    uint8_t* out = memory_.get() + 1;
    const auto put = [&](auto value) {
      std::memcpy(out, &value, sizeof value);
      out += sizeof value;
    };
    const auto half = [&] { put(static_cast<uint16_t>(0x2c00 + (rng() & 0x83ff))); };  // +-(0.06 .. 0.12)
    while (out != memory_.get() + 1 + bytes_) {
      switch (format) {
        case StoredFormat::kF32:
          put(normal(rng));
          break;
        case StoredFormat::kF16:
          half();
          break;
        case StoredFormat::kBF16:
          put(float_to_bf16(normal(rng)));
          break;
        case StoredFormat::kQ4_1:
          half();
          [[fallthrough]];
        case StoredFormat::kQ4_0:
        case StoredFormat::kQ8_0:
          half();
          for (int i = 0; i < (format == StoredFormat::kQ8_0 ? 32 : 16); ++i) put(static_cast<uint8_t>(rng()));
          break;
      }
    }
  }

  const uint8_t* data() const { return memory_.get() + 1; }

  StoredFormat format;

 private:
  int64_t bytes_;
  std::unique_ptr<uint8_t[]> memory_;
};

struct Aligned64 {
  void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], Aligned64>;

AlignedBytes aligned_bytes(size_t size, uint8_t fill) {
  AlignedBytes bytes(new (std::align_val_t{64}) uint8_t[size]);
  std::memset(bytes.get(), fill, size);
  return bytes;
}

struct Input {
  std::vector<float> x;
  std::vector<uint16_t> bf16;
  std::vector<QuantBlock> blocks;

  Input(const Kernels& kernels, Packing packing, const std::vector<float>& values, int64_t rows, int64_t k)
      : x(values.begin(), values.begin() + rows * k) {
    if (packing == Packing::kBF16) {
      bf16.resize(rows * k);
      for (int64_t r = 0; r < rows; ++r) kernels.to_bf16_row(&x[r * k], k, &bf16[r * k]);
    } else if (packing != Packing::kF32) {
      blocks.resize(rows * k / kQuantBlock);
      for (int64_t r = 0; r < rows; ++r) kernels.quantize_row(&x[r * k], k, &blocks[r * k / kQuantBlock]);
    }
  }

  const void* data() const {
    if (!bf16.empty()) return bf16.data();
    return blocks.empty() ? static_cast<const void*>(x.data()) : blocks.data();
  }
};

void check_packing(const Case& c, const Stored& stored, const PackedMatrix& shape, const uint8_t* packed) {
  const size_t size = packed_bytes(shape);
  CHECK_MSG(shape.panel_bytes % 64 == 0, c.name());
  // Panels in any order, over another filling: every byte is written, and by its own panel.
  const AlignedBytes other = aligned_bytes(size, 0xa5);
  for (int64_t p = num_panels(shape) - 1; p >= 0; --p) {
    pack_panels(shape, stored.format, stored.data(), p, p + 1, other.get());
    for (int64_t i = 0; i < p * shape.panel_bytes; i += 7) CHECK_MSG(other[i] == 0xa5, c.name());
  }
  CHECK_MSG(std::memcmp(packed, other.get(), size) == 0, c.name());
}

void check_products(const Case& c, const PackedMatrix& matrix, const Kernels& kernels, const Kernels& portable,
                    std::mt19937& rng) {
  constexpr int64_t kMostRows = 19;
  constexpr float kUntouched = -12345.0f;
  std::normal_distribution<float> normal;
  std::vector<float> x(kMostRows * c.k), bias(c.n);
  for (float& v : x) v = normal(rng);
  for (float& v : bias) v = normal(rng);
  const int64_t stride = c.n + 3;
  const int64_t panels = num_panels(matrix);

  std::vector<float> expected(kMostRows * c.n);
  {
    const Input input(portable, matrix.packing, x, kMostRows, c.k);
    portable.linear({matrix, {kMostRows, c.k, input.data()}, bias.data(), expected.data(), c.n}, 0, panels);
  }
  std::vector<float> weights(c.k);
  for (int64_t column : {int64_t{0}, c.n / 2, c.n - 1}) {
    unpack_row(matrix, column, weights.data());
    double sum = bias[column], magnitude = 1;
    for (int64_t i = 0; i < c.k; ++i) {
      sum += static_cast<double>(weights[i]) * x[i];
      magnitude += std::fabs(static_cast<double>(weights[i]) * x[i]);
    }
    CHECK_MSG(std::fabs(expected[column] - sum) < 0.01 * magnitude, c.name());
  }

  for (int64_t rows : {1, 2, 5, 8, 13, 19}) {
    const Input input(kernels, matrix.packing, x, rows, c.k);
    for (int64_t step : {int64_t{1}, int64_t{3}, int64_t{4}, panels}) {
      for (int64_t p = 0; p < panels; p += step) {
        const int64_t end = p + step < panels ? p + step : panels;
        std::vector<float> out((rows - 1) * stride + c.n, kUntouched);  // ends with the last row's last column
        kernels.linear({matrix, {rows, c.k, input.data()}, bias.data(), out.data(), stride}, p, end);
        for (size_t i = 0; i < out.size(); ++i) {
          const int64_t row = static_cast<int64_t>(i) / stride, column = static_cast<int64_t>(i) % stride;
          const bool written = column >= p * kPanel && column < end * kPanel && column < c.n;
          const float wanted = written ? expected[row * c.n + column] : kUntouched;
          CHECK_MSG(std::memcmp(&out[i], &wanted, sizeof wanted) == 0,
                    c.name() + ", " + kernels.name + ", " + std::to_string(rows) + " rows, panels " +
                        std::to_string(p) + " to " + std::to_string(end));
        }
      }
    }
  }
}

void check_case(const Case& c) {
  std::mt19937 rng(static_cast<unsigned>(c.n * 1000 + c.k));
  const Stored stored(c, rng);
  PackedMatrix matrix = describe_packed(stored.format, c.float32, c.n, c.k);
  const AlignedBytes packed = aligned_bytes(packed_bytes(matrix), 0x5a);
  pack_panels(matrix, stored.format, stored.data(), 0, num_panels(matrix), packed.get());
  check_packing(c, stored, matrix, packed.get());
  matrix.data = packed.get();
  for (const std::string& isa : available_isas())
    check_products(c, matrix, kernels_for(isa), kernels_for("portable"), rng);
}

void check_refusals() {
  CHECK(octavo::test::throws<std::invalid_argument>([] { stored_format("q2_k"); }));
  CHECK(octavo::test::throws<std::invalid_argument>([] { describe_packed(StoredFormat::kQ4_0, false, 16, 48); }));
  CHECK(octavo::test::throws<std::invalid_argument>([] { describe_packed(StoredFormat::kF32, false, 0, 48); }));
  CHECK(octavo::test::throws<std::invalid_argument>([] { describe_packed(StoredFormat::kF32, false, 16, -1); }));
  CHECK(octavo::test::throws<std::invalid_argument>(
      [] { describe_packed(StoredFormat::kF32, false, int64_t{1} << 40, int64_t{1} << 40); }));
}

}  // namespace

int main() {
  const octavo::KernelFpu fpu;
  for (const int64_t n : {1, 15, 16, 17, 95}) {
    for (const int64_t k : {32, 64, 160}) {
      for (const char* format : {"q4_0", "q4_1", "q8_0"}) check_case({format, false, n, k});
    }
    for (const int64_t k : {1, 2, 31, 64}) {
      for (const char* format : {"f32", "f16", "bf16"}) {
        check_case({format, false, n, k});
        check_case({format, true, n, k});
      }
    }
  }
  check_refusals();
  return octavo::test::failures();
}
