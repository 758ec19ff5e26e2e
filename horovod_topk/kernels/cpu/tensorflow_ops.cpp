/* The kernels as TensorFlow operations, through TensorFlow's C interface (tensorflow/c/ops.h and
 * kernels.h), whose functions are looked up when this library is loaded: it is compiled without
 * TensorFlow, and one build works with all versions that have these functions.
 *
 *     TopkefEncode(residual: R, scales: double, gradients: G, squares: S * R, template: uint8, keys: int64)
 *         -> candidate: R, payload
 *     TopkefDecode(gathered: uint8, flags: bool, scale: double) -> gradients: G
 *
 * Both have the attributes `recipe`, as in topkef.h, and `threads`. `residual` is the bucket's whole arena, `scales` has
 * a factor for each of its tensors, or none. `template` is an empty payload, `keys` are as in topkef.h, or empty.
 * `shapes` has the number of dimensions of each gradient, and the dimensions.
 *
 *     TopkefUpdate(gradients, weights: N * R, moments: M * R, arrivals: B * uint8, numbers, losses: double,
 *                  factors: R, does: int32) -> what it computes of weights, moments and arrivals
 *
 * `arrivals` are arrays of several tensors: `arrays` has the position of each tensor's, `samples` its first element.
 * Moments are the momentum of each tensor (SGD), or m, v and amsgrad's largest v of each (Adam). `numbers` are the
 * gradient's factor and those of topkef_sgd or topkef_adam; `losses` are SGD's, one a tensor, and `factors` are
 * Adam's, two a tensor. If it `does` 1, arrivals are as before; 2: 255. `samples` has the places of the weights' samples as in
 * topkef_energies.
 *
 *     TopkefEnergies(arrays: N * R, arrivals: uint8) -> sums: R, as topkef_energies; no arrivals: null
 *     TopkefLost(gradients: N * R, before, after: R, scales: double, arrivals: uint8) -> sums: R, as topkef_lost
 *     TopkefScale(arrays: N * R, factors: R) -> arrays times their factors; the same arrays where these are 1
 *
 * If `stretches` has the first element and the number of elements of stretches of one array, these have the factors.
 */
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "topkef.h"

extern "C" {
struct TF_Construction;
struct TF_Context;
struct TF_KernelBuilder;
struct TF_OpBuilder;
struct TF_ShapeContext;
struct TF_Status;
struct TF_Tensor;
}

namespace {

enum Type { FLOAT = 1, DOUBLE = 2, UINT8 = 4, BFLOAT16 = 14, HALF = 19 };
enum Code { OK = 0, INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8, DATA_LOSS = 15 };

constexpr int64_t HEAD = 9, EACH = 10;  // numbers in a recipe, as in bucket.cpp
constexpr int64_t SHARD_BLOCK = 512;         // as in passes.h
constexpr size_t LINE = 64;            // bytes; the alignment that TensorFlow needs

using Create = void *(*)(TF_Construction *);
using Compute = void (*)(void *, TF_Context *);
using Delete = void (*)(void *);
using Infer = void (*)(TF_ShapeContext *, TF_Status *);
using Free = void (*)(void *, size_t, void *);

/* The functions of TensorFlow that are used: result, name and parameters of each. */
#define TENSORFLOW(F) \
  F(TF_Status *, TF_NewStatus, ()) \
  F(void, TF_DeleteStatus, (TF_Status *)) \
  F(void, TF_SetStatus, (TF_Status *, int, const char *)) \
  F(int, TF_GetCode, (const TF_Status *)) \
  F(TF_OpBuilder *, TF_NewOpDefinitionBuilder, (const char *)) \
  F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpBuilder *, const char *)) \
  F(void, TF_OpDefinitionBuilderAddInput, (TF_OpBuilder *, const char *)) \
  F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpBuilder *, const char *)) \
  F(void, TF_OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpBuilder *, Infer)) \
  F(void, TF_RegisterOpDefinition, (TF_OpBuilder *, TF_Status *)) \
  F(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeContext *, TF_Status *)) \
  F(TF_KernelBuilder *, TF_NewKernelBuilder, (const char *, const char *, Create, Compute, Delete)) \
  F(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *)) \
  F(void, TF_OpKernelConstruction_GetAttrSize, (TF_Construction *, const char *, int32_t *, \
    int32_t *, TF_Status *)) \
  F(void, TF_OpKernelConstruction_GetAttrInt64List, (TF_Construction *, const char *, int64_t *, \
    int, TF_Status *)) \
  F(void, TF_OpKernelConstruction_GetAttrInt64, (TF_Construction *, const char *, int64_t *, \
    TF_Status *)) \
  F(void, TF_OpKernelConstruction_Failure, (TF_Construction *, TF_Status *)) \
  F(void, TF_OpKernelContext_Failure, (TF_Context *, TF_Status *)) \
  F(int, TF_NumInputs, (TF_Context *)) \
  F(void, TF_GetInput, (TF_Context *, int, TF_Tensor **, TF_Status *)) \
  F(void, TF_SetOutput, (TF_Context *, int, const TF_Tensor *, TF_Status *)) \
  F(TF_Tensor *, TF_NewTensor, (int, const int64_t *, int, void *, size_t, Free, void *)) \
  F(void, TF_DeleteTensor, (TF_Tensor *)) \
  F(void *, TF_TensorData, (const TF_Tensor *)) \
  F(size_t, TF_TensorByteSize, (const TF_Tensor *)) \
  F(int, TF_TensorType, (const TF_Tensor *)) \
  F(int, TF_NumDims, (const TF_Tensor *)) \
  F(int64_t, TF_Dim, (const TF_Tensor *, int))

struct Api {
#define DECLARE(result, name, parameters) result(*name) parameters;
  TENSORFLOW(DECLARE)
#undef DECLARE
};

Api tf;

bool find_tensorflow() {
  void *library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  bool all = library != nullptr;
#define FIND(result, name, parameters) \
  all = all && (tf.name = reinterpret_cast<decltype(tf.name)>(dlsym(library, #name))) != nullptr;
  TENSORFLOW(FIND)
#undef FIND
  return all;
}

class Status {
 public:
  Status() : status_(tf.TF_NewStatus()) {}
  ~Status() { tf.TF_DeleteStatus(status_); }
  Status(const Status &) = delete;
  Status &operator=(const Status &) = delete;
  operator TF_Status *() { return status_; }
  bool ok() const { return tf.TF_GetCode(status_) == OK; }

 private:
  TF_Status *status_;
};

class Input {
 public:
  Input(TF_Context *context, int position, TF_Status *status) {
    tf.TF_GetInput(context, position, &tensor_, status);
  }
  ~Input() {
    if (tensor_) tf.TF_DeleteTensor(tensor_);
  }
  Input(Input &&other) : tensor_(other.tensor_) { other.tensor_ = nullptr; }
  Input(const Input &) = delete;
  const void *data() const { return tf.TF_TensorData(tensor_); }
  int64_t bytes() const { return (int64_t)tf.TF_TensorByteSize(tensor_); }

  const TF_Tensor *tensor() const { return tensor_; }
  int type() const { return tf.TF_TensorType(tensor_); }

  std::vector<int64_t> shape() const {
    std::vector<int64_t> found;
    for (int i = 0; i < tf.TF_NumDims(tensor_); ++i) found.push_back(tf.TF_Dim(tensor_, i));
    return found;
  }

 private:
  TF_Tensor *tensor_ = nullptr;
};

/* Memory of released outputs, for reuse in the next step: touching fresh pages takes longer than the
 * kernels. Tensors may outlive the kernel that made them, so each refers to the store. */
class Store : public std::enable_shared_from_this<Store> {
 public:
  ~Store() {
    for (auto &each : free_) std::free(each.second);
  }

  TF_Tensor *tensor(int type, const std::vector<int64_t> &shape, int64_t bytes) {
    void *memory = take((size_t)bytes);
    if (!memory) return nullptr;
    auto *self = new std::shared_ptr<Store>(shared_from_this());
    return tf.TF_NewTensor(type, shape.data(), (int)shape.size(), memory, (size_t)bytes, give_back, self);
  }

 private:
  static size_t room(size_t bytes) { return (bytes + LINE) / LINE * LINE; }

  void *take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.find(room(bytes));
    if (found == free_.end()) return std::aligned_alloc(LINE, room(bytes));
    void *memory = found->second;
    free_.erase(found);
    return memory;
  }

  static void give_back(void *memory, size_t bytes, void *store) {
    std::unique_ptr<std::shared_ptr<Store>> self(static_cast<std::shared_ptr<Store> *>(store));
    std::lock_guard<std::mutex> lock((*self)->mutex_);
    (*self)->free_.emplace(room(bytes), memory);
  }

  std::mutex mutex_;
  std::multimap<size_t, void *> free_;
};

/* What an operation keeps: its attributes, and the memory of its outputs. */
struct Kept {
  std::vector<int64_t> list, other;  // attributes that are lists of numbers
  int64_t threads = 1;
  std::shared_ptr<Store> store = std::make_shared<Store>();

  bool start() { return true; }
};

/* What is kept for a bucket: `list` is its recipe, `other` the shapes of its gradients. */
struct Kernel : Kept {
  topkef_bucket *bucket = nullptr;
  std::mutex mutex;

  bool start() { return (bucket = topkef_bucket_new(list.data(), (int64_t)list.size())) != nullptr; }
  ~Kernel() {
    if (bucket) topkef_bucket_free(bucket);
  }

  int64_t tensors() const { return list[0]; }
  int64_t residual_bytes() const { return list[1]; }
  int64_t payload_bytes() const { return list[4]; }
  int64_t numel(int64_t tensor) const { return number(tensor, 0); }
  int64_t start(int64_t tensor) const { return number(tensor, 2); }
  int64_t dtype(int64_t tensor) const { return number(tensor, 6); }
  int64_t gradient(int64_t tensor) const { return number(tensor, 8); }

  int64_t gradients() const {
    int64_t most = 0;
    for (int64_t t = 0; t < tensors(); ++t) most = std::max(most, gradient(t) + 1);
    return most;
  }

  /* Number of elements of a gradient, from all its shards. */
  int64_t gradient_numel(int64_t position) const {
    int64_t sum = 0;
    for (int64_t t = 0; t < tensors(); ++t) sum += gradient(t) == position ? numel(t) : 0;
    return sum;
  }

  /* Smallest possible number of elements of a gradient, from one shard. */
  int64_t reach(int64_t t) const {
    int64_t last = numel(t) - 1;
    return last < 0 ? 0 : (last / SHARD_BLOCK * list[6] + number(t, 7)) * SHARD_BLOCK + last % SHARD_BLOCK + 1;
  }

 private:
  int64_t number(int64_t tensor, int64_t which) const {
    return list[(size_t)(HEAD + EACH * tensor + which)];
  }
};

/* An attribute that is a list of numbers. */
std::vector<int64_t> numbers(TF_Construction *construction, const char *name, TF_Status *status) {
  int32_t count = 0, total = 0;
  tf.TF_OpKernelConstruction_GetAttrSize(construction, name, &count, &total, status);
  std::vector<int64_t> found((size_t)(count > 0 ? count : 0));
  if (tf.TF_GetCode(status) == OK)
    tf.TF_OpKernelConstruction_GetAttrInt64List(construction, name, found.data(), count, status);
  return found;
}

/* other: name of the second attribute, or null. */
template <class T>
void *create(TF_Construction *construction, const char *list, const char *other, bool threads = true) {
  auto kept = std::make_unique<T>();
  Status status;
  kept->list = numbers(construction, list, status);
  if (status.ok() && other) kept->other = numbers(construction, other, status);
  if (status.ok() && threads)
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, "threads", &kept->threads, status);
  if (status.ok() && !kept->start()) tf.TF_SetStatus(status, INVALID_ARGUMENT, "TopKEF: not a recipe");
  if (!status.ok()) tf.TF_OpKernelConstruction_Failure(construction, status);
  return kept.release();
}

template <class T>
void destroy(void *kept) {
  delete static_cast<T *>(kept);
}

void fail(TF_Context *context, Code code, const std::string &text) {
  Status status;
  tf.TF_SetStatus(status, code, text.c_str());
  tf.TF_OpKernelContext_Failure(context, status);
}

/* Fail the operation unless a tensor has the size in the recipe. */
bool check_size(TF_Context *context, const char *what, int64_t position, int64_t bytes,
                int64_t expected) {
  if (bytes == expected) return true;
  fail(context, INVALID_ARGUMENT,
       std::string("TopKEF: ") + what + " " + std::to_string(position) + " has " + std::to_string(bytes) +
           " bytes, the recipe says " + std::to_string(expected));
  return false;
}

int64_t gradient_bytes(int64_t dtype) { return dtype == 3 ? 8 : dtype == 2 ? 4 : 2; }

/* An output's memory, nullptr after a failure; the context takes ownership of the tensor. */
void *output(Store &store, TF_Context *context, int64_t position, int type, const std::vector<int64_t> &shape,
             int64_t bytes) {
  Status status;
  TF_Tensor *tensor = store.tensor(type, shape, bytes);
  if (tensor)
    tf.TF_SetOutput(context, (int)position, tensor, status);
  else
    tf.TF_SetStatus(status, RESOURCE_EXHAUSTED, "TopKEF: out of memory");
  void *data = status.ok() ? tf.TF_TensorData(tensor) : nullptr;
  if (!data) tf.TF_OpKernelContext_Failure(context, status);
  if (tensor) tf.TF_DeleteTensor(tensor);
  return data;
}

/* Read all inputs of an operation; false after a failure. */
bool read(TF_Context *context, std::vector<Input> &inputs) {
  Status status;
  for (int64_t i = 0; i < tf.TF_NumInputs(context); ++i) {
    inputs.emplace_back(context, (int)i, status);
    if (!status.ok()) {
      tf.TF_OpKernelContext_Failure(context, status);
      return false;
    }
  }
  return true;
}

void encode(void *state, TF_Context *context) {
  auto kernel = static_cast<Kernel *>(state);
  std::lock_guard<std::mutex> lock(kernel->mutex);
  const int64_t tensors = kernel->tensors(), width = kernel->residual_bytes(), bytes = kernel->payload_bytes();
  std::vector<Input> inputs;
  if (!read(context, inputs)) return;
  const Input &residual = inputs[0], &scales = inputs[1], *each = &inputs[2];
  const int64_t arena = residual.bytes();
  auto candidate = static_cast<uint8_t *>(
      output(*kernel->store, context, 0, width == 8 ? DOUBLE : FLOAT, {arena / width}, arena));
  if (!candidate) return;
  std::vector<const void *> residuals, gradients((size_t)kernel->gradients());
  std::vector<void *> candidates;
  int64_t filled = 0;
  for (int64_t t = 0; t < tensors; ++t) {
    const Input &g = each[kernel->gradient(t)];
    const int64_t start = kernel->start(t) * width, stop = start + kernel->numel(t) * width;
    const int64_t needed = kernel->reach(t) * gradient_bytes(kernel->dtype(t));
    if (!check_size(context, "residual", t, std::min(arena, stop), stop) ||
        !check_size(context, "gradient", t, std::min(g.bytes(), needed), needed))
      return;
    residuals.push_back(static_cast<const uint8_t *>(residual.data()) + start);
    gradients[(size_t)kernel->gradient(t)] = g.data();
    if (start > filled) std::memset(candidate + filled, 0, (size_t)(start - filled));
    candidates.push_back(candidate + start);
    filled = stop;
  }
  if (arena > filled) std::memset(candidate + filled, 0, (size_t)(arena - filled));
  const auto last = (int64_t)inputs.size() - 2;  // position of the template
  std::vector<const void *> squares;
  for (int64_t i = 2 + kernel->gradients(); i < last; ++i)
    squares.push_back(inputs[(size_t)i].bytes() ? inputs[(size_t)i].data() : nullptr);
  const auto known = (int64_t)squares.size();
  if (known && !check_size(context, "squares", known, known, kernel->gradients())) return;
  for (int64_t t = 0; known && t < tensors; ++t) {
    const Input &v = each[kernel->gradients() + kernel->gradient(t)];
    const int64_t needed = v.bytes() ? kernel->reach(t) * width : 0;
    if (!check_size(context, "squares", t, std::min(v.bytes(), needed), needed)) return;
  }
  topkef_correction correction{};
  correction.squares = known ? squares.data() : nullptr;
  correction.scales = scales.bytes() ? static_cast<const double *>(scales.data()) : nullptr;
  const Input &empty = inputs[(size_t)last], &keys = inputs.back();
  if (scales.bytes() && !check_size(context, "scales", 0, scales.bytes(), 8 * tensors)) return;
  if (keys.bytes() && !check_size(context, "keys", 0, keys.bytes(), 3 * 8 * tensors)) return;
  if (!check_size(context, "template", 0, empty.bytes(), bytes)) return;
  auto payload = static_cast<uint8_t *>(output(*kernel->store, context, 1, UINT8, {bytes}, bytes));
  if (!payload) return;
  std::memcpy(payload, empty.data(), (size_t)bytes);
  auto streams = keys.bytes() ? static_cast<const int64_t *>(keys.data()) : nullptr;
  topkef_encode(kernel->bucket, residuals.data(), gradients.data(), candidates.data(), payload,
                known || correction.scales ? &correction : nullptr, streams, (int)kernel->threads);
}

void decode(void *state, TF_Context *context) {
  auto kernel = static_cast<Kernel *>(state);
  std::lock_guard<std::mutex> lock(kernel->mutex);
  const int64_t tensors = kernel->tensors(), bytes = kernel->payload_bytes();
  std::vector<Input> inputs;
  if (!read(context, inputs)) return;
  const Input &gathered = inputs[0], &flags = inputs[1], &scale = inputs[2];
  const int64_t ranks = gathered.bytes() / bytes;
  if (!check_size(context, "gathered", 0, gathered.bytes(), ranks * bytes) ||
      !check_size(context, "flags", 0, flags.bytes(), tensors) ||
      !check_size(context, "scale", 0, scale.bytes(), 8))
    return;
  static constexpr int TYPES[] = {HALF, BFLOAT16, FLOAT, DOUBLE};
  std::vector<void *> gradients((size_t)kernel->gradients());
  std::vector<std::vector<int64_t>> shapes;
  for (size_t at = 0; at < kernel->other.size(); at += 1 + (size_t)kernel->other[at]) {
    const int64_t *sizes = &kernel->other[at] + 1;
    shapes.emplace_back(sizes, sizes + sizes[-1]);
  }
  if (!check_size(context, "shapes", 0, (int64_t)shapes.size(), kernel->gradients())) return;
  for (int64_t t = 0; t < tensors; ++t) {
    const int64_t position = kernel->gradient(t), numel = kernel->gradient_numel(position);
    void *&gradient = gradients[(size_t)position];
    if (gradient) continue;
    const std::vector<int64_t> &shape = shapes[(size_t)position];
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    if (!check_size(context, "shape", position, count, numel)) return;
    gradient = output(*kernel->store, context, position, TYPES[kernel->dtype(t)], shape,
                      numel * gradient_bytes(kernel->dtype(t)));
    if (!gradient) return;
  }
  int64_t wrong = topkef_decode(kernel->bucket, static_cast<const uint8_t *>(gathered.data()), ranks,
                                *static_cast<const double *>(scale.data()),
                                static_cast<const uint8_t *>(flags.data()), gradients.data(),
                                (int)kernel->threads);
  if (wrong < 0) return;
  std::string text = "TopKEF: rank " + std::to_string(wrong / tensors) + ", tensor " +
                     std::to_string(wrong % tensors) +
                     ": its indices do not ascend or lie outside the tensor, or a scale is negative or no "
                     "number";
  fail(context, DATA_LOSS, text);
}

/* What operations on samples keep: `list` has six numbers a tensor, `other` the position of each tensor's arrivals
 * among the arrays. */
struct Sampler : Kept {
  size_t count() const { return list.size() / 6; }
};

bool any(const void *array, int64_t bytes) {
  auto each = static_cast<const uint8_t *>(array);
  return std::any_of(each, each + bytes, [](uint8_t byte) { return byte != 0; });
}

/* Root mean squares of samples of the weights. */
template <class R>
std::vector<R> roots(const std::vector<const void *> &weights, const std::vector<int64_t> &samples, int threads) {
  const auto count = (int64_t)weights.size();
  std::vector<double> sums(weights.size());
  topkef_energies(weights.data(), nullptr, samples.data(), count, (int)sizeof(R), threads, sums.data());
  std::vector<R> found;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t *place = &samples[(size_t)(6 * i)], blocks = (place[2] + SHARD_BLOCK - 1) / SHARD_BLOCK;
    int64_t size = 0;
    for (int64_t block = 0; block < blocks; block += place[5])
      size += std::min(SHARD_BLOCK, place[2] - block * SHARD_BLOCK);
    found.push_back(std::sqrt((R)sums[(size_t)i] / (R)size));
  }
  return found;
}

/* The arrays that arrivals become; empty after a failure. Those that not all tensors of are updated begin as copies. */
std::vector<uint8_t *> arrivals_after(Sampler &updater, TF_Context *context, const Input *before, size_t first) {
  std::vector<int64_t> updated;
  for (size_t i = 0; i < updater.count(); ++i) {
    const auto at = (size_t)updater.other[i];
    if (at >= updated.size()) updated.resize(at + 1);
    const int64_t *place = &updater.list[6 * i], stop = place[1] + place[2];
    if (!check_size(context, "arrivals", (int64_t)i, std::min(before[at].bytes(), stop), stop)) return {};
    updated[at] += place[2];
  }
  std::vector<uint8_t *> after;
  for (size_t at = 0; at < updated.size(); ++at) {
    const int64_t bytes = before[at].bytes();
    void *made = output(*updater.store, context, (int64_t)(first + at), UINT8, before[at].shape(), bytes);
    if (!made) return {};
    if (updated[at] < bytes) std::memcpy(made, before[at].data(), (size_t)bytes);
    after.push_back(static_cast<uint8_t *>(made));
  }
  return after;
}

void update(void *state, TF_Context *context) {
  auto updater = static_cast<Sampler *>(state);
  std::vector<Input> inputs;
  if (!read(context, inputs)) return;
  const size_t count = updater->count(), every = inputs.size() - 4;
  const auto arrays = (size_t)(1 + *std::max_element(updater->other.begin(), updater->other.end()));
  const size_t each = (every - 2 * count - arrays) / count;  // moments of a tensor
  const Input *gradients = &inputs[0], *weights = gradients + count, *moments = weights + count,
              *arrivals = moments + each * count, *last = arrivals + arrays;
  const bool is_adam = each > 1;
  auto given = static_cast<const double *>(last[0].data());
  const int64_t needed = is_adam ? sizeof(topkef_adam) : sizeof(topkef_sgd);
  if (!check_size(context, "numbers", 0, last[0].bytes(), needed + 8)) return;
  if (!is_adam && !check_size(context, "losses", 0, last[1].bytes(), 8 * (int64_t)count)) return;
  const int64_t width = weights[0].type() == DOUBLE ? 8 : 4;
  if (is_adam && !check_size(context, "factors", 0, last[2].bytes(), 2 * width * (int64_t)count)) return;
  std::vector<uint8_t *> arrivals_to = arrivals_after(*updater, context, arrivals, (1 + each) * count);
  if (arrivals_to.empty()) return;
  std::vector<topkef_update> from(count), to(count);
  std::vector<const void *> places, codes;
  for (size_t i = 0; i < count; ++i) {
    const int64_t numel = updater->list[6 * i + 2], bytes = numel * width;
    topkef_update &before = from[i], &after = to[i];
    after.gradient = gradients[i].data();
    after.count = numel;
    after.gain = given[0];
    std::memcpy(&after.numbers, given + 1, (size_t)needed);
    if (!is_adam) after.numbers.sgd.loss = static_cast<const double *>(last[1].data())[i];
    before = after;
    auto place = [&](const Input &input, size_t position, void *topkef_update::*field) {
      if (!check_size(context, "tensor", (int64_t)i, input.bytes(), bytes)) return false;
      before.*field = const_cast<void *>(input.data());
      after.*field = output(*updater->store, context, (int64_t)position, width == 8 ? DOUBLE : FLOAT, input.shape(),
                            bytes);
      return after.*field != nullptr;
    };
    void *topkef_update::*const fields[] = {&topkef_update::momentum, &topkef_update::square,
                                            &topkef_update::largest};
    if (!check_size(context, "gradient", (int64_t)i, gradients[i].bytes(), bytes) ||
        !place(weights[i], i, &topkef_update::weight))
      return;
    for (size_t m = 0; m < each; ++m)
      if (!place(moments[i * each + m], count + i * each + m, fields[m])) return;
    places.push_back(before.weight);
    const auto array = (size_t)updater->other[i];
    const int64_t start = updater->list[6 * i + 1];
    before.arrivals = static_cast<uint8_t *>(const_cast<void *>(arrivals[array].data())) + start;
    after.arrivals = arrivals_to[array] + start;
    codes.push_back(before.arrivals);
  }
  const int threads = (int)updater->threads, does = *static_cast<const int32_t *>(last[3].data());
  std::vector<float> narrow;
  std::vector<double> wide;
  if (is_adam && width == 8) wide = roots<double>(places, updater->list, threads);
  if (is_adam && width == 4) narrow = roots<float>(places, updater->list, threads);
  std::vector<std::vector<uint8_t>> ones;
  for (size_t i = 0; i < count; ++i) {
    topkef_update &before = from[i], &after = to[i];
    after.factors = static_cast<const uint8_t *>(last[2].data()) + 2 * (size_t)width * i * is_adam;
    after.rms = !is_adam ? nullptr : width == 8 ? static_cast<const void *>(&wide[i]) : &narrow[i];
    // A momentum of dense steps: mu^t of it is left after t steps, as with arrivals in each step.
    if (does == 2 ||
        (!is_adam && !any(before.arrivals, after.count) && any(before.momentum, after.count * width))) {
      ones.emplace_back((size_t)after.count, (uint8_t)255);
      before.arrivals = ones.back().data();
    }
  }
  topkef_update_all(to.data(), from.data(), (int64_t)count, (int)width, threads);
  for (size_t i = 0; does && i < count; ++i)
    std::memcpy(to[i].arrivals, does == 2 ? ones[i].data() : codes[i], (size_t)to[i].count);
}

template <class R>
void narrow_to(const std::vector<double> &from, void *to) {
  std::copy(from.begin(), from.end(), static_cast<R *>(to));
}

/* Sums of double as an operation's output, of the type of its arrays. */
void write_sums(Sampler &sampler, TF_Context *context, const std::vector<double> &sums, int type) {
  const auto found = (int64_t)sums.size();
  void *out = output(*sampler.store, context, 0, type, {found}, found * (type == DOUBLE ? 8 : 4));
  if (out) type == DOUBLE ? narrow_to<double>(sums, out) : narrow_to<float>(sums, out);
}

/* Whether arrays and, if there are any, arrivals are as large as the samples say. */
bool check_sampled(const Sampler &sampler, TF_Context *context, const Input *arrays, int64_t width, int64_t coded) {
  for (size_t i = 0; i < sampler.count(); ++i) {
    const int64_t *place = &sampler.list[6 * i], stop = place[1] + place[2];
    if (!check_size(context, "array", (int64_t)i, arrays[i].bytes(), place[2] * width)) return false;
    if (coded && !check_size(context, "arrivals", (int64_t)i, std::min(coded, stop), stop)) return false;
  }
  return true;
}

std::vector<const void *> data_of(const Input *inputs, size_t count) {
  std::vector<const void *> found;
  for (size_t i = 0; i < count; ++i) found.push_back(inputs[i].data());
  return found;
}

void energies(void *state, TF_Context *context) {
  auto sampler = static_cast<Sampler *>(state);
  std::vector<Input> inputs;
  if (!read(context, inputs)) return;
  const int type = inputs[0].type(), width = type == DOUBLE ? 8 : 4;
  const size_t count = sampler->count();
  const int64_t coded = inputs[count].bytes();
  if (!check_sampled(*sampler, context, &inputs[0], width, coded)) return;
  std::vector<double> sums(count * (coded ? 2 : 1));
  auto arrivals = coded ? static_cast<const uint8_t *>(inputs[count].data()) : nullptr;
  topkef_energies(data_of(&inputs[0], count).data(), arrivals, sampler->list.data(), (int64_t)count, width,
                  (int)sampler->threads, sums.data());
  write_sums(*sampler, context, sums, type);
}

void lost(void *state, TF_Context *context) {
  auto sampler = static_cast<Sampler *>(state);
  std::vector<Input> inputs;
  if (!read(context, inputs)) return;
  const size_t count = sampler->count();
  const Input &before = inputs[count], &after = inputs[count + 1], &scales = inputs[count + 2],
              &arrivals = inputs[count + 3];
  const int type = before.type(), width = type == DOUBLE ? 8 : 4;
  if (!check_sampled(*sampler, context, &inputs[0], width, std::max<int64_t>(arrivals.bytes(), 1)) ||
      !check_size(context, "candidate", 0, after.bytes(), before.bytes()) ||
      (scales.bytes() && !check_size(context, "scales", 0, scales.bytes(), 8 * (int64_t)count)))
    return;
  std::vector<double> sums(2 * count);
  topkef_lost(data_of(&inputs[0], count).data(), before.data(),
              scales.bytes() ? static_cast<const double *>(scales.data()) : nullptr, after.data(),
              static_cast<const uint8_t *>(arrivals.data()), sampler->list.data(), (int64_t)count, width,
              (int)sampler->threads, sums.data());
  write_sums(*sampler, context, sums, type);
}

/* Scale stretches of one array. */
template <class R>
void scale_stretches(const Kept &scaler, TF_Context *context, const std::vector<Input> &inputs) {
  const size_t count = scaler.list.size() / 2;
  if (!check_size(context, "factors", 0, inputs[1].bytes(), (int64_t)(count * sizeof(R)))) return;
  auto factors = static_cast<const R *>(inputs[1].data());
  Status status;
  if (std::all_of(factors, factors + count, [](R each) { return each == 1; })) {
    tf.TF_SetOutput(context, 0, inputs[0].tensor(), status);
    if (!status.ok()) tf.TF_OpKernelContext_Failure(context, status);
    return;
  }
  const int64_t bytes = inputs[0].bytes();
  auto to = static_cast<R *>(output(*scaler.store, context, 0, inputs[0].type(), inputs[0].shape(), bytes));
  if (!to) return;
  std::memcpy(to, inputs[0].data(), (size_t)bytes);
  for (size_t i = 0; i < count; ++i) {
    const int64_t start = scaler.list[2 * i], stop = start + scaler.list[2 * i + 1];
    if (!check_size(context, "array", 0, std::min(bytes, stop * (int64_t)sizeof(R)), stop * (int64_t)sizeof(R))) return;
    if (factors[i] != 1) std::for_each(to + start, to + stop, [&](R &each) { each *= factors[i]; });
  }
}

template <class R>
void scale_as(Store &store, TF_Context *context, const std::vector<Input> &inputs) {
  const size_t count = inputs.size() - 1;
  if (!check_size(context, "factors", 0, inputs[count].bytes(), (int64_t)(count * sizeof(R)))) return;
  auto factors = static_cast<const R *>(inputs[count].data());
  Status status;
  for (size_t i = 0; i < count; ++i) {
    if (factors[i] == 1) {
      tf.TF_SetOutput(context, (int)i, inputs[i].tensor(), status);
      if (!status.ok()) return tf.TF_OpKernelContext_Failure(context, status);
      continue;
    }
    auto from = static_cast<const R *>(inputs[i].data());
    const int64_t bytes = inputs[i].bytes();
    auto to = static_cast<R *>(output(store, context, (int64_t)i, inputs[i].type(), inputs[i].shape(), bytes));
    if (!to) return;
    std::transform(from, from + bytes / (int64_t)sizeof(R), to, [=](R each) { return each * factors[i]; });
  }
}

template <class R>
void scale_any(const Kept &scaler, TF_Context *context, const std::vector<Input> &inputs) {
  scaler.list.empty() ? scale_as<R>(*scaler.store, context, inputs) : scale_stretches<R>(scaler, context, inputs);
}

void scale(void *state, TF_Context *context) {
  auto scaler = static_cast<Kept *>(state);
  std::vector<Input> inputs;
  if (!read(context, inputs)) return;
  inputs[0].type() == DOUBLE ? scale_any<double>(*scaler, context, inputs) : scale_any<float>(*scaler, context, inputs);
}

void unknown_shapes(TF_ShapeContext *context, TF_Status *status) {
  tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
}

void define(const char *name, std::vector<const char *> attributes, std::vector<const char *> inputs,
            std::vector<const char *> outputs, Create create, Compute compute, Delete destroy) {
  Status status;
  TF_OpBuilder *op = tf.TF_NewOpDefinitionBuilder(name);
  for (const char *each : attributes) tf.TF_OpDefinitionBuilderAddAttr(op, each);
  for (const char *each : inputs) tf.TF_OpDefinitionBuilderAddInput(op, each);
  for (const char *each : outputs) tf.TF_OpDefinitionBuilderAddOutput(op, each);
  tf.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, unknown_shapes);
  tf.TF_RegisterOpDefinition(op, status);
  if (status.ok())
    tf.TF_RegisterKernelBuilder(name, tf.TF_NewKernelBuilder(name, "CPU", create, compute, destroy),
                                status);
}

/* Runs while the library is loaded, and registers its operations with TensorFlow. */
__attribute__((constructor)) void define_operations() {
  if (!find_tensorflow()) return;
  const char *gradients = "G: list({half, bfloat16, float, double}) >= 1";
  define("TopkefEncode", {"R: {float, double}", "S: int >= 0", gradients, "recipe: list(int)", "threads: int"},
         {"residual: R", "scales: double", "gradients: G", "squares: S * R", "template: uint8", "keys: int64"},
         {"candidate: R", "payload: uint8"},
         [](TF_Construction *from) { return create<Kernel>(from, "recipe", nullptr); }, encode, destroy<Kernel>);
  define("TopkefDecode", {gradients, "recipe: list(int)", "shapes: list(int)", "threads: int"},
         {"gathered: uint8", "flags: bool", "scale: double"}, {"gradients: G"},
         [](TF_Construction *from) { return create<Kernel>(from, "recipe", "shapes"); }, decode, destroy<Kernel>);
  define("TopkefUpdate",
         {"R: {float, double}", "N: int >= 1", "M: int >= 1", "B: int >= 1", "samples: list(int)", "arrays: list(int)",
          "threads: int"},
         {"gradients: N * R", "weights: N * R", "moments: M * R", "arrivals: B * uint8", "numbers: double",
          "losses: double", "factors: R", "does: int32"},
         {"new_weights: N * R", "new_moments: M * R", "new_arrivals: B * uint8"},
         [](TF_Construction *from) { return create<Sampler>(from, "samples", "arrays"); }, update, destroy<Sampler>);
  auto create_sampler = [](TF_Construction *from) { return create<Sampler>(from, "samples", nullptr); };
  define("TopkefEnergies", {"R: {float, double}", "N: int >= 1", "samples: list(int)", "threads: int"},
         {"arrays: N * R", "arrivals: uint8"}, {"sums: R"}, create_sampler, energies, destroy<Sampler>);
  define("TopkefLost", {"R: {float, double}", "N: int >= 1", "samples: list(int)", "threads: int"},
         {"gradients: N * R", "before: R", "after: R", "scales: double", "arrivals: uint8"}, {"sums: R"},
         create_sampler, lost, destroy<Sampler>);
  define("TopkefScale", {"R: {float, double}", "N: int >= 1", "stretches: list(int)"}, {"arrays: N * R", "factors: R"},
         {"scaled: N * R"}, [](TF_Construction *from) { return create<Kept>(from, "stretches", nullptr, false); }, scale,
         destroy<Kept>);
}

}  // namespace
