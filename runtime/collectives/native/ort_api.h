/* The entries of ONNX Runtime's C API that the operators use.
 *
 * Its wheels have no header. The table of functions is append-only: an entry keeps its place for ever, so a place and a
 * type say all that a caller needs. Version 18 of the API is that of ONNX Runtime 1.18; tests load the operators in each
 * version that is supported. */
#ifndef SPLITC_ORT_API_H
#define SPLITC_ORT_API_H

#include <stddef.h>
#include <stdint.h>

#define ORT_VERSION 18

typedef struct OrtStatus OrtStatus; /* NULL where all went well */
typedef struct OrtValue OrtValue;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtCustomOp OrtCustomOp;

/* Number types, by their numbers in ONNX. */
enum {
    ORT_UNDEFINED = 0,
    ORT_FLOAT = 1,
    ORT_UINT8 = 2,
    ORT_INT8 = 3,
    ORT_INT32 = 6,
    ORT_INT64 = 7,
    ORT_FLOAT16 = 10,
    ORT_DOUBLE = 11,
    ORT_UINT32 = 12,
    ORT_BFLOAT16 = 16
};
enum { ORT_FAIL = 1 };
enum { ORT_REQUIRED = 0, ORT_OPTIONAL = 1, ORT_VARIADIC = 2 };
enum { ORT_DEFAULT_MEMORY = 0 };

typedef union OrtApi {
    const void* place[1];
} OrtApi;

typedef struct OrtApiBase {
    const OrtApi* (*GetApi)(uint32_t version);
    const char* (*GetVersionString)(void);
} OrtApiBase;

/* Calls an entry by its place: ORT(api, CreateStatus)(code, message). */
#define ORT(api, entry) ((entry##_t)(api)->place[entry##_at])
#define ORT_ENTRY(name, at, result, ...)  \
    typedef result (*name##_t)(__VA_ARGS__); \
    enum { name##_at = at }

ORT_ENTRY(CreateStatus, 0, OrtStatus*, int code, const char* message);
ORT_ENTRY(CreateCustomOpDomain, 26, OrtStatus*, const char* domain, OrtCustomOpDomain** made);
ORT_ENTRY(CustomOpDomain_Add, 27, OrtStatus*, OrtCustomOpDomain* domain, const OrtCustomOp* op);
ORT_ENTRY(AddCustomOpDomain, 28, OrtStatus*, OrtSessionOptions* options, OrtCustomOpDomain* domain);
ORT_ENTRY(GetTensorMutableData, 51, OrtStatus*, OrtValue* value, void** data);
ORT_ENTRY(GetTensorElementType, 60, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, int* type);
ORT_ENTRY(GetDimensionsCount, 61, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, size_t* count);
ORT_ENTRY(GetDimensions, 62, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, int64_t* sizes, size_t count);
ORT_ENTRY(GetTensorShapeElementCount, 64, OrtStatus*, const OrtTensorTypeAndShapeInfo* info, size_t* count);
ORT_ENTRY(GetTensorTypeAndShape, 65, OrtStatus*, const OrtValue* value, OrtTensorTypeAndShapeInfo** info);
ORT_ENTRY(KernelInfoGetAttribute_int64, 86, OrtStatus*, const OrtKernelInfo* info, const char* name, int64_t* number);
ORT_ENTRY(KernelContext_GetInput, 90, OrtStatus*, const OrtKernelContext* context, size_t index, const OrtValue** input);
ORT_ENTRY(KernelContext_GetOutput, 91, OrtStatus*, OrtKernelContext* context, size_t index, const int64_t* sizes,
          size_t count, OrtValue** output);
ORT_ENTRY(ReleaseTensorTypeAndShapeInfo, 99, void, OrtTensorTypeAndShapeInfo* info);
ORT_ENTRY(ReleaseCustomOpDomain, 101, void, OrtCustomOpDomain* domain);
ORT_ENTRY(KernelContext_GetGPUComputeStream, 193, OrtStatus*, const OrtKernelContext* context, void** stream);

/* An operator as ONNX Runtime takes it; it reads as many fields as `version` has. */
struct OrtCustomOp {
    uint32_t version;
    void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
    const char* (*GetName)(const OrtCustomOp*);
    const char* (*GetExecutionProviderType)(const OrtCustomOp*);
    int (*GetInputType)(const OrtCustomOp*, size_t);
    size_t (*GetInputTypeCount)(const OrtCustomOp*);
    int (*GetOutputType)(const OrtCustomOp*, size_t);
    size_t (*GetOutputTypeCount)(const OrtCustomOp*);
    void (*KernelCompute)(void*, OrtKernelContext*);
    void (*KernelDestroy)(void*);
    int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
    int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
    int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
    int (*GetVariadicInputMinArity)(const OrtCustomOp*);
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
    int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
    OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
    OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);
    int (*GetStartVersion)(const OrtCustomOp*);
    int (*GetEndVersion)(const OrtCustomOp*);
    size_t (*GetMayInplace)(int** inputs, int** outputs);
    void (*ReleaseMayInplace)(int* inputs, int* outputs);
    size_t (*GetAliasMap)(int** inputs, int** outputs);
    void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

#endif
