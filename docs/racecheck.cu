// What racecheck follows (DESIGN.md, Note [Racecheck]). Each kernel hands a word from some threads of a CTA to others. Not part of the package.
//
//     nvcc -O2 -lineinfo -gencode=arch=compute_90a,code=sm_90a docs/racecheck.cu -o racecheck && compute-sanitizer --tool racecheck ./racecheck
#include <cstdint>
#include <cstdio>

#define MEET(id, threads) asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory")

__device__ uint32_t at(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }
__device__ void init(uint64_t* bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(bar)), "r"(count)); }
__device__ void arrive(uint64_t* bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(bar)) : "memory"); }
__device__ void wait(uint64_t* bar) {
  asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra.uni again;\n}" ::"r"(at(bar)) : "memory");
}

// In order: thread 0 writes, all meet, the upper half reads. SOME: the lower half has met before, by itself.
template <bool SOME> __global__ void all_meet(int* out) {
  __shared__ volatile int word;
  int thread = threadIdx.x;
  if (SOME && thread < 128) MEET(1, 128);
  if (thread == 0) word = 1;
  __syncthreads();
  if (thread >= 128) out[thread] = word;
}

// 128 threads write, 128 others wait at an mbarrier and read. EACH: every writer arrives, else one for all, after they have met: in order,
// too. RACE: the readers do not wait.
template <bool EACH, bool RACE> __global__ void hand_over(int* out) {
  __shared__ volatile int words[128];
  __shared__ uint64_t full;
  int thread = threadIdx.x;
  if (thread == 0) init(&full, EACH ? 128 : 1);
  __syncthreads();
  if (thread < 128) {
    words[thread] = thread;
    if (!EACH) MEET(1, 128);
    if (EACH || thread == 0) arrive(&full);
  } else {
    if (!RACE) wait(&full);
    out[thread] = words[255 - thread];
  }
}

#define RUN(...) printf("%s\n", #__VA_ARGS__), fflush(stdout), __VA_ARGS__<<<132, 256>>>(out), cudaDeviceSynchronize()

int main() {
  int* out;
  cudaMalloc(&out, 1024);
  RUN(all_meet<false>);
  RUN(all_meet<true>);
  RUN(hand_over<true, false>);
  RUN(hand_over<false, false>);
  RUN(hand_over<true, true>);
  return cudaGetLastError() != cudaSuccess;
}
