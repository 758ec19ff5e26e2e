/* The kernels as TensorFlow operations, through TensorFlow's C interface (tensorflow/c/ops.h and
 * kernels.h), whose functions are looked up when this library is loaded: it is compiled without
 * TensorFlow, and one build works with all versions that have these functions.
 *
 *     TopkefEncode(residuals: N * R, gradients: G, template: uint8, keys: int64) -> candidates: N * R,
 *                                                                                 payload
 *     TopkefDecode(gathered: uint8, flags: bool, scale: double) -> gradients: G, flat
 *
 * Both have the attributes `recipe`, as in topkef.h, and `threads`. `template` is an empty payload,
 * `keys` are as in topkef.h, or empty.
 */
#include <dlfcn.h>

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

/* The functions of TensorFlow that are used. */
struct Api {
  TF_Status *(*TF_NewStatus)();
  void (*TF_DeleteStatus)(TF_Status *);
  void (*TF_SetStatus)(TF_Status *, int, const char *);
  int (*TF_GetCode)(const TF_Status *);
  TF_OpBuilder *(*TF_NewOpDefinitionBuilder)(const char *);
  void (*TF_OpDefinitionBuilderAddAttr)(TF_OpBuilder *, const char *);
  void (*TF_OpDefinitionBuilderAddInput)(TF_OpBuilder *, const char *);
  void (*TF_OpDefinitionBuilderAddOutput)(TF_OpBuilder *, const char *);
  void (*TF_OpDefinitionBuilderSetShapeInferenceFunction)(TF_OpBuilder *, Infer);
  void (*TF_RegisterOpDefinition)(TF_OpBuilder *, TF_Status *);
  void (*TF_ShapeInferenceContextSetUnknownShape)(TF_ShapeContext *, TF_Status *);
  TF_KernelBuilder *(*TF_NewKernelBuilder)(const char *, const char *, Create, Compute, Delete);
  void (*TF_RegisterKernelBuilder)(const char *, TF_KernelBuilder *, TF_Status *);
  void (*TF_OpKernelConstruction_GetAttrSize)(TF_Construction *, const char *, int32_t *, int32_t *,
                                              TF_Status *);
  void (*TF_OpKernelConstruction_GetAttrInt64List)(TF_Construction *, const char *, int64_t *, int,
                                                   TF_Status *);
  void (*TF_OpKernelConstruction_GetAttrInt64)(TF_Construction *, const char *, int64_t *,
                                               TF_Status *);
  void (*TF_OpKernelConstruction_Failure)(TF_Construction *, TF_Status *);
  void (*TF_OpKernelContext_Failure)(TF_Context *, TF_Status *);
  int (*TF_NumInputs)(TF_Context *);
  void (*TF_GetInput)(TF_Context *, int, TF_Tensor **, TF_Status *);
  void (*TF_SetOutput)(TF_Context *, int, const TF_Tensor *, TF_Status *);
  TF_Tensor *(*TF_NewTensor)(int, const int64_t *, int, void *, size_t, Free, void *);
  void (*TF_DeleteTensor)(TF_Tensor *);
  void *(*TF_TensorData)(const TF_Tensor *);
  size_t (*TF_TensorByteSize)(const TF_Tensor *);
};

Api tf;

bool find_tensorflow() {
  void *library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  bool all = library != nullptr;
  auto find = [&](auto &function, const char *name) {
    if (library) function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    all = all && function;
  };
#define FIND(name) find(tf.name, #name)
  FIND(TF_NewStatus);
  FIND(TF_DeleteStatus);
  FIND(TF_SetStatus);
  FIND(TF_GetCode);
  FIND(TF_NewOpDefinitionBuilder);
  FIND(TF_OpDefinitionBuilderAddAttr);
  FIND(TF_OpDefinitionBuilderAddInput);
  FIND(TF_OpDefinitionBuilderAddOutput);
  FIND(TF_OpDefinitionBuilderSetShapeInferenceFunction);
  FIND(TF_RegisterOpDefinition);
  FIND(TF_ShapeInferenceContextSetUnknownShape);
  FIND(TF_NewKernelBuilder);
  FIND(TF_RegisterKernelBuilder);
  FIND(TF_OpKernelConstruction_GetAttrSize);
  FIND(TF_OpKernelConstruction_GetAttrInt64List);
  FIND(TF_OpKernelConstruction_GetAttrInt64);
  FIND(TF_OpKernelConstruction_Failure);
  FIND(TF_OpKernelContext_Failure);
  FIND(TF_NumInputs);
  FIND(TF_GetInput);
  FIND(TF_SetOutput);
  FIND(TF_NewTensor);
  FIND(TF_DeleteTensor);
  FIND(TF_TensorData);
  FIND(TF_TensorByteSize);
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

  TF_Tensor *tensor(int type, int64_t count, int64_t bytes) {
    void *memory = take((size_t)bytes);
    if (!memory) return nullptr;
    auto *self = new std::shared_ptr<Store>(shared_from_this());
    return tf.TF_NewTensor(type, &count, 1, memory, (size_t)bytes, give_back, self);
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

/* The state that both operations keep for a bucket. */
class Kernel {
 public:
  std::vector<int64_t> recipe;
  topkef_bucket *bucket = nullptr;
  std::shared_ptr<Store> store = std::make_shared<Store>();
  int64_t threads = 1;
  std::mutex mutex;

  ~Kernel() {
    if (bucket) topkef_bucket_free(bucket);
  }

  int64_t tensors() const { return recipe[0]; }
  int64_t residual_bytes() const { return recipe[1]; }
  int64_t payload_bytes() const { return recipe[4]; }
  int64_t numel(int64_t tensor) const { return number(tensor, 0); }
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
    return last < 0 ? 0 : (last / SHARD_BLOCK * recipe[6] + number(t, 7)) * SHARD_BLOCK + last % SHARD_BLOCK + 1;
  }

 private:
  int64_t number(int64_t tensor, int64_t which) const {
    return recipe[(size_t)(HEAD + EACH * tensor + which)];
  }
};

void *create(TF_Construction *construction) {
  auto kernel = std::make_unique<Kernel>();
  Status status;
  int32_t count = 0, total = 0;
  tf.TF_OpKernelConstruction_GetAttrSize(construction, "recipe", &count, &total, status);
  kernel->recipe.resize((size_t)(count > 0 ? count : 0));
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrInt64List(construction, "recipe", kernel->recipe.data(), count,
                                                status);
  if (status.ok())
    tf.TF_OpKernelConstruction_GetAttrInt64(construction, "threads", &kernel->threads, status);
  if (status.ok()) kernel->bucket = topkef_bucket_new(kernel->recipe.data(), count);
  if (status.ok() && !kernel->bucket)
    tf.TF_SetStatus(status, INVALID_ARGUMENT, "TopKEF: not a recipe");
  if (!status.ok()) tf.TF_OpKernelConstruction_Failure(construction, status);
  return kernel.release();
}

void destroy(void *kernel) { delete static_cast<Kernel *>(kernel); }

/* Fail the operation unless a tensor has the size in the recipe. */
bool check_size(TF_Context *context, const char *what, int64_t position, int64_t bytes,
                int64_t expected) {
  if (bytes == expected) return true;
  Status status;
  std::string text = std::string("TopKEF: ") + what + " " + std::to_string(position) + " has " +
                     std::to_string(bytes) + " bytes, the recipe says " + std::to_string(expected);
  tf.TF_SetStatus(status, INVALID_ARGUMENT, text.c_str());
  tf.TF_OpKernelContext_Failure(context, status);
  return false;
}

int64_t gradient_bytes(int64_t dtype) { return dtype == 3 ? 8 : dtype == 2 ? 4 : 2; }

/* An output's memory, nullptr after a failure; the context takes ownership of the tensor. */
void *output(Kernel *kernel, TF_Context *context, int64_t position, int type, int64_t count,
             int64_t bytes) {
  Status status;
  TF_Tensor *tensor = kernel->store->tensor(type, count, bytes);
  if (tensor)
    tf.TF_SetOutput(context, (int)position, tensor, status);
  else
    tf.TF_SetStatus(status, RESOURCE_EXHAUSTED, "TopKEF: out of memory");
  void *data = status.ok() ? tf.TF_TensorData(tensor) : nullptr;
  if (!data) tf.TF_OpKernelContext_Failure(context, status);
  if (tensor) tf.TF_DeleteTensor(tensor);
  return data;
}

void encode(void *state, TF_Context *context) {
  auto kernel = static_cast<Kernel *>(state);
  std::lock_guard<std::mutex> lock(kernel->mutex);
  const int64_t tensors = kernel->tensors(), width = kernel->residual_bytes();
  Status status;
  std::vector<Input> inputs;
  for (int64_t i = 0; i < tf.TF_NumInputs(context); ++i) {
    inputs.emplace_back(context, (int)i, status);
    if (!status.ok()) return tf.TF_OpKernelContext_Failure(context, status);
  }
  std::vector<const void *> residuals, gradients((size_t)kernel->gradients());
  std::vector<void *> candidates;
  for (int64_t t = 0; t < tensors; ++t) {
    const Input &e = inputs[(size_t)t], &g = inputs[(size_t)(tensors + kernel->gradient(t))];
    int64_t numel = kernel->numel(t), needed = kernel->reach(t) * gradient_bytes(kernel->dtype(t));
    if (!check_size(context, "residual", t, e.bytes(), numel * width) ||
        !check_size(context, "gradient", t, std::min(g.bytes(), needed), needed))
      return;
    residuals.push_back(e.data());
    gradients[(size_t)kernel->gradient(t)] = g.data();
    candidates.push_back(
        output(kernel, context, t, width == 8 ? DOUBLE : FLOAT, numel, numel * width));
    if (!candidates.back()) return;
  }
  const auto last = (int64_t)inputs.size() - 2;  // position of the template
  std::vector<const void *> squares;
  for (int64_t i = tensors + kernel->gradients(); i < last; ++i)
    squares.push_back(inputs[(size_t)i].bytes() ? inputs[(size_t)i].data() : nullptr);
  const auto known = (int64_t)squares.size();
  if (known && !check_size(context, "squares", known, known, kernel->gradients())) return;
  if (known)
    for (int64_t t = 0; t < tensors; ++t) {
      const Input &v = inputs[(size_t)(tensors + kernel->gradients() + kernel->gradient(t))];
      const int64_t needed = v.bytes() ? kernel->reach(t) * width : 0;
      if (!check_size(context, "squares", t, std::min(v.bytes(), needed), needed)) return;
    }
  topkef_correction correction{};
  correction.squares = squares.data();
  const Input &empty = inputs[(size_t)last], &keys = inputs.back();
  const int64_t bytes = kernel->payload_bytes();
  if (keys.bytes() && !check_size(context, "keys", 0, keys.bytes(), 3 * 8 * tensors)) return;
  if (!check_size(context, "template", 0, empty.bytes(), bytes)) return;
  auto payload = static_cast<uint8_t *>(output(kernel, context, tensors, UINT8, bytes, bytes));
  if (!payload) return;
  std::memcpy(payload, empty.data(), (size_t)bytes);
  auto streams = keys.bytes() ? static_cast<const int64_t *>(keys.data()) : nullptr;
  topkef_encode(kernel->bucket, residuals.data(), gradients.data(), candidates.data(), payload,
                squares.empty() ? nullptr : &correction, streams, (int)kernel->threads);
}

void decode(void *state, TF_Context *context) {
  auto kernel = static_cast<Kernel *>(state);
  std::lock_guard<std::mutex> lock(kernel->mutex);
  const int64_t tensors = kernel->tensors(), bytes = kernel->payload_bytes();
  Status status;
  Input gathered(context, 0, status), flags(context, 1, status), scale(context, 2, status);
  if (!status.ok()) return tf.TF_OpKernelContext_Failure(context, status);
  const int64_t ranks = gathered.bytes() / bytes;
  if (!check_size(context, "gathered", 0, gathered.bytes(), ranks * bytes) ||
      !check_size(context, "flags", 0, flags.bytes(), tensors) ||
      !check_size(context, "scale", 0, scale.bytes(), 8))
    return;
  static constexpr int TYPES[] = {HALF, BFLOAT16, FLOAT, DOUBLE};
  std::vector<void *> gradients((size_t)kernel->gradients());
  for (int64_t t = 0; t < tensors; ++t) {
    void *&gradient = gradients[(size_t)kernel->gradient(t)];
    if (gradient) continue;
    int64_t numel = kernel->gradient_numel(kernel->gradient(t));
    gradient = output(kernel, context, kernel->gradient(t), TYPES[kernel->dtype(t)], numel,
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
  tf.TF_SetStatus(status, DATA_LOSS, text.c_str());
  tf.TF_OpKernelContext_Failure(context, status);
}

void unknown_shapes(TF_ShapeContext *context, TF_Status *status) {
  tf.TF_ShapeInferenceContextSetUnknownShape(context, status);
}

void define(const char *name, std::vector<const char *> attributes,
            std::vector<const char *> inputs, std::vector<const char *> outputs, Compute compute) {
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
  define("TopkefEncode",
         {"R: {float, double}", "N: int >= 1", "S: int >= 0", gradients, "recipe: list(int)",
          "threads: int"},
         {"residuals: N * R", "gradients: G", "squares: S * R", "template: uint8", "keys: int64"},
         {"candidates: N * R", "payload: uint8"}, encode);
  define("TopkefDecode", {gradients, "recipe: list(int)", "threads: int"},
         {"gathered: uint8", "flags: bool", "scale: double"}, {"gradients: G"}, decode);
}

}  // namespace
