// The sampler, for octavo/backends/cpu/sampler.py: flat arrays in and out, one call per step with the GIL released.
#include "core/sampler.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/registry.h"
#include "core/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> view(const Vector<const T>& array) {
  return {array.data(), array.shape(0)};
}

// A numpy array that owns the vector.
template <typename T>
auto to_numpy(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

std::vector<std::uint8_t> codes(const std::vector<RowStatus>& status) {
  std::vector<std::uint8_t> result;
  for (const RowStatus s : status) result.push_back(static_cast<std::uint8_t>(s));
  return result;
}

nb::tuple to_tuple(RowLogprobs&& logprobs) {
  return nb::make_tuple(to_numpy(std::move(logprobs.offsets)), to_numpy(std::move(logprobs.ids)),
                        to_numpy(std::move(logprobs.values)), to_numpy(std::move(logprobs.ranks)));
}

void check_shape(const Sampler& sampler, std::size_t rows, std::size_t columns, std::size_t expected_rows) {
  if (rows != expected_rows || columns != static_cast<std::size_t>(sampler.vocab()))
    throw std::invalid_argument("logits of shape (" + std::to_string(rows) + ", " + std::to_string(columns) +
                                "); expected (" + std::to_string(expected_rows) + ", " +
                                std::to_string(sampler.vocab()) + ")");
}

}  // namespace

void register_sampler(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler", "Per-slot sampling state; see core/sampler.h.")
      .def(
          "__init__",
          [](Sampler* self, std::int32_t max_slots, std::int32_t vocab_size, const std::optional<std::string>& isa,
             Pool* pool) {
            new (self) Sampler(isa ? kernels_for(*isa) : default_kernels(), max_slots, vocab_size, pool);
          },
          "max_slots"_a, "vocab_size"_a, "isa"_a = nb::none(), "pool"_a = nb::none(), nb::keep_alive<1, 5>())
      .def(
          "start",
          [](Sampler& self, std::int32_t slot, const Vector<const std::int32_t>& tokens, std::int64_t num_prompt_tokens,
             double temperature, std::int32_t top_k, double top_p, double min_p, float presence_penalty,
             float frequency_penalty, float repetition_penalty, std::uint64_t seed, std::uint32_t choice,
             std::int64_t min_tokens, std::vector<std::int32_t> end_ids,
             std::vector<std::pair<std::int32_t, float>> logit_bias,
             std::optional<std::vector<std::int32_t>> allowed_ids, std::vector<std::vector<std::int32_t>> bad_words,
             std::optional<std::int32_t> logprobs) {
            self.start(slot,
                       {.temperature = temperature,
                        .top_k = top_k,
                        .top_p = top_p,
                        .min_p = min_p,
                        .presence_penalty = presence_penalty,
                        .frequency_penalty = frequency_penalty,
                        .repetition_penalty = repetition_penalty,
                        .seed = seed,
                        .choice = choice,
                        .min_tokens = min_tokens,
                        .end_ids = std::move(end_ids),
                        .logit_bias = std::move(logit_bias),
                        .allowed_ids = std::move(allowed_ids),
                        .bad_words = std::move(bad_words),
                        .logprobs = logprobs},
                       view(tokens), num_prompt_tokens);
          },
          "slot"_a, "tokens"_a, "num_prompt_tokens"_a, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
          "presence_penalty"_a, "frequency_penalty"_a, "repetition_penalty"_a, "seed"_a, "choice"_a, "min_tokens"_a,
          "end_ids"_a, "logit_bias"_a, "allowed_ids"_a.none(), "bad_words"_a, "logprobs"_a.none())
      .def(
          "extend",
          [](Sampler& self, std::int32_t slot, const Vector<const std::int32_t>& tokens) {
            self.extend(slot, view(tokens));
          },
          "slot"_a, "tokens"_a.noconvert())
      .def("stop", &Sampler::stop, "slot"_a)
      .def(
          "sample",
          [](Sampler& self, const Matrix<float>& logits, const Vector<const std::int32_t>& slots,
             const Vector<const std::int64_t>& positions, const std::optional<Matrix<const std::uint32_t>>& mask_words,
             const std::optional<Vector<const std::int32_t>>& mask_rows) {
            check_shape(self, logits.shape(0), logits.shape(1), slots.shape(0));
            if (mask_words.has_value() != mask_rows.has_value())
              throw std::invalid_argument("mask_words and mask_rows come together");
            if (mask_rows && mask_rows->shape(0) != slots.shape(0))
              throw std::invalid_argument("masks for " + std::to_string(mask_rows->shape(0)) + " rows; expected " +
                                          std::to_string(slots.shape(0)));
            RowMasks masks;
            if (mask_words) {
              masks.words = {mask_words->data(), mask_words->size()};
              masks.num_words = static_cast<std::int64_t>(mask_words->shape(1));
              masks.rows = view(*mask_rows);
            }
            SampledRows rows;
            {
              const nb::gil_scoped_release release;
              rows = self.sample(logits.data(), view(slots), view(positions), masks);
            }
            const bool usable =
                std::all_of(rows.status.begin(), rows.status.end(), [](RowStatus s) { return s == RowStatus::kOk; });
            if (usable && rows.logprobs.ids.empty())
              return nb::make_tuple(to_numpy(std::move(rows.tokens)), nb::none(), nb::none());
            return nb::make_tuple(to_numpy(std::move(rows.tokens)), to_numpy(codes(rows.status)),
                                  to_tuple(std::move(rows.logprobs)));
          },
          "logits"_a.noconvert(), "slots"_a.noconvert(), "positions"_a.noconvert(),
          "mask_words"_a.noconvert() = nb::none(), "mask_rows"_a.noconvert() = nb::none(),
          "(tokens, statuses, (offsets, ids, logprobs, ranks)), by row and flat. The last two are None where all rows "
          "have a token and none has logprobs.")
      .def(
          "score",
          [](Sampler& self, const Matrix<const float>& logits, const Vector<const std::int32_t>& targets,
             std::int32_t num_top) {
            check_shape(self, logits.shape(0), logits.shape(1), targets.shape(0));
            std::vector<RowStatus> status;
            RowLogprobs logprobs;
            {
              const nb::gil_scoped_release release;
              logprobs = self.score(logits.data(), view(targets), num_top, status);
            }
            return nb::make_tuple(to_numpy(codes(status)), to_tuple(std::move(logprobs)));
          },
          "logits"_a.noconvert(), "targets"_a.noconvert(), "num_top"_a, "(statuses, (offsets, ids, logprobs, ranks)).");
}

}  // namespace octavo
