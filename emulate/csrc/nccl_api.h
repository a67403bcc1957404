// NCCL's public C interface, as far as the stand-in has it: names, numbers and layouts are facts of NCCL 2.18 to 2.32.
#ifndef LAGOM_NCCL_API_H
#define LAGOM_NCCL_API_H
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
} ncclResult_t;

typedef enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps, ncclMaxRedOp = 0x7fffffff } ncclRedOp_t;

typedef enum {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
  ncclNumTypes
} ncclDataType_t;

typedef enum { ncclScalarDevice, ncclScalarHostImmediate } ncclScalarResidence_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef struct ncclComm* ncclComm_t;
typedef void* cudaStream_t;
typedef void* ncclWindow_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_API_MAGIC 0xcafebeef
#define NCCL_SPLIT_NOCOLOR (-1)

// Grows with releases; only what lies within `size` is read.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;
  int splitShare, trafficClass;
  const char* commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx;
  int maxP2pPeers, graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode, nvlsHostMode;
} ncclConfig_t;
_Static_assert(sizeof(ncclConfig_t) == 120 && offsetof(ncclConfig_t, nvlsCTAs) == 68, "the layout of NCCL 2.32");

// Of one collective, from 2.32 on.
typedef struct {
  size_t size;
  unsigned magic, version;
  const void* ext;  // options of other vendors' libraries, which NCCL's ignores
  int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
  const char* algSelection;
  int forceAlgSelection, CTAPolicy;
  uint64_t userProfilerTag;
  void* launchCompletionEvent;
} ncclCollConfig_t;
_Static_assert(sizeof(ncclCollConfig_t) == 72 && offsetof(ncclCollConfig_t, launchCompletionEvent) == 64, "the layout of NCCL 2.32");

typedef struct {
  size_t size;
  unsigned magic, version;
  float estimatedTime;
} ncclSimInfo_t;

#endif
