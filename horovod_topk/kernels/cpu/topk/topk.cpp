/* Encodes a tensor of which the k largest elements are sent. */
#include <algorithm>
#include <cmath>
#include <vector>

#include "float_formats.h"
#include "tensor.h"

namespace topkef {

namespace {

constexpr int64_t STREAMED = 1 << 16;   // elements above which several streams pay
constexpr int64_t GOING_OUT = 2 * PACE; // entries whose memory fits in second-level caches
constexpr int64_t AHEAD = 24;           // distance of prefetches, in rows of a sample
constexpr int64_t SAMPLED_RANK = 32;  // below this rank, a sample is too small to select by it

/* A sample of a tensor: the first sixteen elements of every row, at most one in 128. */
struct Sample {
  static constexpr int64_t run = 16;
  int64_t stride, rows;

  explicit Sample(int64_t numel)
      : stride(std::max<int64_t>(numel / 1024, 2048) | 1), rows(numel / stride) {}

  int64_t size() const { return rows * run; }
};

/* The threshold from which a step starts: a little below that of the step before. A threshold that was
 * too high costs a pass; if this happens often, samples are used instead. */
class Carried {
 public:
  bool is_of_use() {
    if (doubts_ > 0) --doubts_;
    return has_last_ && doubts_ < DISTRUST;
  }

  double threshold() const { return last_ * (1 - slack_); }

  void remember(double threshold, bool is_finite) {
    last_ = threshold;
    has_last_ = is_finite;
  }

  /* Note that a threshold gave `excess` times k candidates; below 1: too few. */
  void learn(double excess, int64_t k) {
    const double good = 1.15 + 2 / std::sqrt((double)k);
    slack_ *= excess < 1 ? 2 : excess > 2 * good ? 0.7 : excess > good ? 0.9 : 1.1;
    slack_ = std::clamp(slack_, 1e-4, 0.25);
    if (excess < 1) doubts_ += DISTRUST / 2 + 1;
    if (doubts_ >= DISTRUST) doubts_ = DISTRUST + 60;
    if (excess > 3 * good) doubts_ = DISTRUST + 4;
  }

 private:
  static constexpr int DISTRUST = 30;  // two misses within 15 steps
  bool has_last_ = false;
  double last_ = 0, slack_ = 0.03;
  int doubts_ = 0;
};

/* Memory of one list, which is reused, and grown if needed. */
template <class R>
class ListMemory {
 public:
  List list(int64_t capacity, bool weighted = false) {
    const auto size = (size_t)(capacity + SLACK);
    if (allocated_ < capacity) {
      index_.reset(new uint32_t[size]);
      value_.reset(new R[size]);
      scratch_.reset(new typename Real<R>::Bits[size]);
      allocated_ = capacity;
    }
    if (weighted && weighted_ < capacity) {
      key_.reset(new R[size]);
      weighted_ = capacity;
    }
    R *const value = value_.get();
    return {index_.get(), value, weighted ? key_.get() : value, scratch_.get(), 0, capacity};
  }

 private:
  std::unique_ptr<uint32_t[]> index_;
  std::unique_ptr<R[]> value_, key_;
  std::unique_ptr<typename Real<R>::Bits[]> scratch_;
  int64_t allocated_ = 0, weighted_ = 0;
};

/* Memory that a thread reuses for every tensor, so that it stays cached. */
template <class R>
struct Workspace {
  std::vector<std::unique_ptr<ListMemory<R>>> candidates;
  ListMemory<R> sample;

  ListMemory<R> *slot(int64_t position) {
    while ((int64_t)candidates.size() <= position)
      candidates.push_back(std::make_unique<ListMemory<R>>());
    return candidates[(size_t)position].get();
  }

  static Workspace &own() {
    static thread_local Workspace workspace;
    return workspace;
  }
};

/* Encodes a tensor of which the k largest are sent. */
template <class R>
class TopK final : public Encoder {
 public:
  TopK(const BucketRecipe &bucket, const TensorRecipe &tensor, const Passes *passes)
      : tensor_(tensor),
        layout_(bucket.shard_layout(tensor)),
        kind_(bucket.kind),
        sampled_(bucket.sampled != 0),
        passes_(passes),
        gather_(passes->gather[tensor.dtype]),
        sum_(passes->sum[tensor.dtype]) {}

  void begin(const Source &source, const Division &division) override {
    streams_ = !division.together && tensor_.numel >= STREAMED ? STREAMS : 1;
    Bits least = first_threshold(source);
    stretches_.resize((size_t)(division.parts * streams_));
    memory_ = division.parts > 1 ? &own_memory_ : Workspace<R>::own().slot(division.slot);
    start(least, source.squares != nullptr);
  }

  void gather(const Source &source, uint8_t *, int64_t part) override {
    do
      gather_(source, stretch(part), streams_, layout_);
    while (!relieve(source, part));
  }

  Stretch *stretch(int64_t part) override { return &stretches_[(size_t)(part * streams_)]; }

  bool relieve(const Source &source, int64_t part) override {
    bool done = true;
    for (Stretch *each = stretch(part); each < stretch(part) + streams_; ++each) {
      if (each->at == each->to) continue;
      Bits worst = keep_best(each, 1, source);
      each->least = std::min<Bits>(worst + 1, Real<R>::infinity);  // later elements lose ties
      done = false;
    }
    return done;
  }

  bool finish(const Source &source, uint8_t *payload) override {
    if (by_last_) carried_.learn((double)found() / (double)tensor_.k, tensor_.k);
    if (found() < (by_sample_ ? (tensor_.k + 1) / 2 : tensor_.k)) look_again(source);
    if (found() < tensor_.k)
      fill(source);
    else
      choose(source);
    join();
    return send(source, payload);
  }

 private:
  using Bits = typename Real<R>::Bits;

  int64_t cuts() const { return (int64_t)stretches_.size(); }

  int64_t found() const {
    int64_t all = 0;
    for (const Stretch &stretch : stretches_) all += stretch.list.size;
    return all;
  }

  /* The first threshold: near the last step's, or below a sample's. */
  Bits first_threshold(const Source &source) {
    double expected = expected_in(Sample(tensor_.numel));
    auto cautious = (int64_t)std::floor(expected - 2 * std::sqrt(expected));
    by_sample_ = sampled_ && cautious >= SAMPLED_RANK;
    by_last_ = !by_sample_ && carried_.is_of_use();
    if (by_sample_) return sampled_threshold(source, cautious);
    if (by_last_) return magnitude_bits((R)carried_.threshold());
    return generous_threshold(source);
  }

  /* A threshold that is most likely a little below the k-th magnitude. */
  Bits generous_threshold(const Source &source) const {
    Sample sample(tensor_.numel);
    if (!sample.rows) return 0;
    double expected = expected_in(sample);
    auto generous = (int64_t)std::ceil(expected + 2.5 * std::sqrt(expected)) + 1;
    return sampled_threshold(source, std::min(generous, sample.size()));
  }

  /* The expected number of the k largest in a sample. */
  double expected_in(const Sample &sample) const {
    return (double)tensor_.k * (double)sample.size() / (double)tensor_.numel;
  }

  Bits sampled_threshold(const Source &source, int64_t rank) const {
    Sample sample(tensor_.numel);
    Stretch all{0, 0, 0, Workspace<R>::own().sample.list(sample.size())};
    auto value = static_cast<R *>(all.list.value);
    const Source glance = without_following(source);
    for (int64_t row = 0; row < std::min(AHEAD, sample.rows); ++row)
      prefetch(source, row * sample.stride);
    for (int64_t row = 0; row < sample.rows; ++row) {
      int64_t first = row * sample.stride;
      prefetch(source, std::min(first + AHEAD * sample.stride, tensor_.numel - 1));
      sum_(glance, first, sample.run, value + row * sample.run, layout_);
    }
    all.list.size = sample.size();
    return (Bits)passes_->choose(&all, 1, rank).least;
  }

  void prefetch(const Source &source, int64_t at) const {
    const int64_t natural = layout_.natural(at);
    __builtin_prefetch(static_cast<const R *>(source.residual) + at);
    __builtin_prefetch(static_cast<const uint8_t *>(source.gradient) +
                       natural * dtype_bytes(tensor_.dtype));
    if (source.velocity) __builtin_prefetch(static_cast<const R *>(source.velocity) + natural);
    if (source.squares) __builtin_prefetch(static_cast<const R *>(source.squares) + natural);
  }

  /* Only add: another pass stores the new velocities. */
  static Source without_following(Source source) {
    source.following = nullptr;
    return source;
  }

  /* Go to the beginning of all stretches, with empty lists, contiguous in memory. */
  void start(Bits least, bool weighted) {
    int64_t room = 0;
    for (int64_t s = 0; s < cuts(); ++s) room += room_of(s);
    List all = memory_->list(room, weighted);
    for (int64_t s = 0; s < cuts(); ++s) {
      Stretch &stretch = stretches_[(size_t)s];
      int64_t from = beginning(tensor_.numel, s, cuts());
      stretch = {from, beginning(tensor_.numel, s + 1, cuts()), least, all};
      stretch.list.capacity = room_of(s) - SLACK;
      all.index += room_of(s);
      all.value = static_cast<R *>(all.value) + room_of(s);
      all.key = static_cast<R *>(all.key) + room_of(s);
      all.scratch = static_cast<Bits *>(all.scratch) + room_of(s);
    }
  }

  /* The k best may all be in one stretch; with half as many more, lists are rarely full. */
  int64_t room_of(int64_t stretch) const {
    int64_t length = beginning(tensor_.numel, stretch + 1, cuts()) -
                     beginning(tensor_.numel, stretch, cuts());
    return std::min(length, tensor_.k + tensor_.k / 2) + 2 * BLOCK;
  }

  /* Keep the best of full lists. Returns the smallest magnitude that is left. */
  Bits keep_best(Stretch *stretches, int64_t count, const Source &source) const {
    Cut cut = passes_->choose(stretches, count, tensor_.k);
    passes_->drop(stretches, count, cut, source.candidate);
    return (Bits)cut.least;
  }

  /* Repeat the pass after a threshold that was too high: with a sample's, then with none. */
  void look_again(const Source &source) {
    by_sample_ = false;
    for (Bits least : {generous_threshold(source), Bits{0}}) {
      start(least, source.squares != nullptr);
      for (int64_t p = 0; p < cuts() / streams_; ++p) gather(source, nullptr, p);
      if (found() >= tensor_.k) return;
    }
  }

  /* Select exactly k, into the first list. */
  void choose(const Source &source) {
    Bits least = keep_best(stretches_.data(), cuts(), source);
    carried_.remember((double)bit_cast<R>(least), least < Real<R>::infinity);
  }

  /* If a sampled threshold gave fewer than k, add the lowest other indices. */
  void fill(const Source &source) {
    int64_t missing = tensor_.k - found();
    if (missing > stretches_[0].to - stretches_[0].list.size) join();
    List &list = stretches_[0].list;
    auto value = static_cast<R *>(list.value);
    int64_t from = 0, length = 0, size = list.size + missing;
    for (int64_t still = missing; still > 0; ++length) {
      if (from < list.size && list.index[from] == (uint32_t)length)
        ++from;
      else
        --still;
    }
    std::copy_backward(list.index + from, list.index + list.size, list.index + size);
    std::copy_backward(value + from, value + list.size, value + size);
    Source unweighted = without_following(source);
    unweighted.squares = nullptr;
    sum_(unweighted, 0, length, value, layout_);
    for (int64_t i = 0; i < length; ++i) {
      list.index[i] = (uint32_t)i;
      store(static_cast<R *>(source.candidate), i, (R)0);
    }
    list.size = size;
  }

  /* Append all lists to the first, in order; they are contiguous in memory. */
  void join() {
    List &all = stretches_[0].list;
    auto to = static_cast<R *>(all.value);
    for (int64_t s = 1; s < cuts(); ++s) {
      List &each = stretches_[(size_t)s].list;
      auto value = static_cast<const R *>(each.value);
      std::copy(each.index, each.index + each.size, all.index + all.size);
      std::copy(value, value + each.size, to + all.size);
      all.size += each.size;
      each.size = 0;
    }
  }

  /* Write all entries, which are in the first list, and store their rounding errors. */
  bool send(const Source &source, uint8_t *payload) const {
    const List &list = stretches_[0].list;
    passes_->pack_index[tensor_.index](list.index, tensor_.k, tensor_.numel,
                                       payload + tensor_.index_at);
    if (kind_ == FULL) {
      mask(source, list.index, tensor_.k);
      return passes_->pack[FULL](list.value, {0, tensor_.k, tensor_.k}, payload + tensor_.value_at,
                                 nullptr, {});
    }
    bool finite = true;
    for (int64_t at = 0; at < tensor_.k; at += GOING_OUT)
      finite &= send_some(source, payload, {at, std::min(GOING_OUT, tensor_.k - at), tensor_.k});
    return finite;
  }

  /* Prefetches the memory of rounding errors while values are packed. */
  bool send_some(const Source &source, uint8_t *payload, Span span) const {
    const List &list = stretches_[0].list;
    const uint32_t *index = list.index + span.first;
    R *value = static_cast<R *>(list.value) + span.first;
    for (int64_t i = 0; i < span.count; ++i)
      __builtin_prefetch(static_cast<const R *>(source.candidate) + index[i], 0, 2);
    if (source.velocity)
      for (int64_t i = 0; i < span.count; ++i)
        __builtin_prefetch(static_cast<const R *>(source.following) + layout_.natural(index[i]), 0, 2);
    mask(source, index, span.count);
    bool finite = passes_->pack[kind_](value, span, payload + tensor_.value_at, value,
                                    Format{});
    passes_->spread(source.candidate, index, value, span.count);
    return finite;
  }

  /* Set the new velocities to 0 where elements are sent. */
  void mask(const Source &source, const uint32_t *index, int64_t count) const {
    if (source.velocity) passes_->mask(source, index, count, layout_);
  }

  const TensorRecipe tensor_;
  const ShardLayout layout_;
  const int64_t kind_;
  const bool sampled_;
  const Passes *const passes_;
  const Gather gather_;
  const Sum sum_;
  ListMemory<R> own_memory_;         // for parts that run at the same time
  ListMemory<R> *memory_ = nullptr;  // what this step uses
  int64_t streams_ = 1;              // stretches a part
  std::vector<Stretch> stretches_;
  bool by_sample_ = false, by_last_ = false;  // where this step's threshold came from
  Carried carried_;
};

}  // namespace

std::unique_ptr<Encoder> make_topk(const BucketRecipe &bucket, const TensorRecipe &tensor, const Passes *passes) {
  if (bucket.residual_bytes == 8) return std::make_unique<TopK<double>>(bucket, tensor, passes);
  return std::make_unique<TopK<float>>(bucket, tensor, passes);
}

}  // namespace topkef
