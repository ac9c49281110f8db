// A CUDA runtime without a GPU: device memory is host memory, kernels do nothing, streams are in order.
#include <cuda_runtime_api.h>
#include <cuda.h>
#include <cstdlib>
#include <cstring>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <ctime>
#define X extern "C" __attribute__((visibility("default")))
static std::mutex m;
struct Block { size_t size; int kind; int dev; };
static std::map<char*, Block>& blocks(){ static auto* b=new std::map<char*,Block>; return *b; }
static size_t used[64];
static thread_local int dev=0;
static thread_local cudaError_t last=cudaSuccess;
static int envi(const char*n,int d){ const char*v=getenv(n); return v?atoi(v):d; }
static int physical(){ return envi("FAKE_GPUS",1); }
#include <dlfcn.h>
static int count(){ static int n=-1; if(n<0){ if(getenv("FAKE_TRACE")){ fprintf(stderr,"CUINIT CUDA_VISIBLE_DEVICES=%s\n",getenv("CUDA_VISIBLE_DEVICES")); auto f=(int(*)(const char*))dlsym(RTLD_DEFAULT,"PyRun_SimpleString"); auto g=(int(*)())dlsym(RTLD_DEFAULT,"PyGILState_Check"); if(f&&g&&g()) f("import traceback,sys; print(\" <- \".join(f\"{x.filename.split(chr(47)+\x27site-packages\x27)[-1]}:{x.lineno} {x.name}\" for x in reversed(traceback.extract_stack()) if \"importlib\" not in x.filename)[:1500],file=sys.stderr)"); }  n=physical(); const char*v=getenv("CUDA_VISIBLE_DEVICES"); if(v){ n=0; std::string s(v); size_t i=0; while(i<=s.size()){ size_t j=s.find(',',i); if(j==std::string::npos)j=s.size(); std::string w=s.substr(i,j-i); if(w.empty()||!isdigit(w[0])||atoi(w.c_str())>=physical())break; n++; i=j+1; if(i>s.size())break;} } if(getenv("FAKE_OLD_DRIVER")) n=-2; } return n; }
static int index_of(int d){ const char*v=getenv("CUDA_VISIBLE_DEVICES"); if(!v)return d; std::string s(v); size_t i=0; for(int k=0;k<d;k++){ i=s.find(',',i); if(i==std::string::npos)return d; i++;} return atoi(s.c_str()+i); }
static size_t total(){ const char*v=getenv("FAKE_GPU_MEM"); return v?strtoull(v,0,10):(8ull<<30); }
static void cc(int&a,int&b){ const char*v=getenv("FAKE_CC"); a=9;b=0; if(v)sscanf(v,"%d.%d",&a,&b); }
static cudaError_t fail(cudaError_t e){ last=e; return e; }
static void* get(size_t n,int kind){ void*p=0; if(posix_memalign(&p,512,n+512))return 0; memset(p,0,n); std::lock_guard<std::mutex> l(m); blocks()[(char*)p]={n,kind,dev}; if(kind==1)used[dev]+=n; return p; }
static void drop(void*p){ if(!p)return; std::lock_guard<std::mutex> l(m); auto it=blocks().find((char*)p); if(it==blocks().end())return; if(it->second.kind==1)used[it->second.dev]-=it->second.size; blocks().erase(it); free(p); }
static Block* find(const void*p){ auto it=blocks().upper_bound((char*)p); if(it==blocks().begin())return 0; --it; if((char*)p<it->first+it->second.size+ (it->second.size==0))return &it->second; return 0; }
X cudaError_t cudaGetDeviceCount(int*n){ int c=count(); if(c==-2){*n=0;return fail(cudaErrorInsufficientDriver);} *n=c; return c?cudaSuccess:fail(cudaErrorNoDevice);}
X cudaError_t cudaSetDevice(int d){ if(d<0||d>=count())return fail(cudaErrorInvalidDevice); dev=d; return cudaSuccess;}
X cudaError_t cudaGetDevice(int*d){*d=dev;return cudaSuccess;}
X cudaError_t cudaGetDeviceProperties(cudaDeviceProp*p,int d){ memset(p,0,sizeof*p); const char*n=getenv("FAKE_GPU_NAME"); strncpy(p->name,n?n:"NVIDIA H200",255); cc(p->major,p->minor); p->totalGlobalMem=total(); p->sharedMemPerBlock=49152; p->sharedMemPerBlockOptin=232448; p->sharedMemPerMultiprocessor=233472; p->regsPerBlock=65536; p->regsPerMultiprocessor=65536; p->warpSize=32; p->maxThreadsPerBlock=1024; p->maxThreadsPerMultiProcessor=2048; for(int i=0;i<3;i++){p->maxThreadsDim[i]=1024;p->maxGridSize[i]=65535;} p->maxGridSize[0]=2147483647; p->multiProcessorCount=132; p->l2CacheSize=52428800; p->textureAlignment=512; p->unifiedAddressing=1; p->canMapHostMemory=1; p->concurrentKernels=1; p->asyncEngineCount=3; p->pciBusID=index_of(d)+1; memset(&p->uuid,0,16); ((char*)&p->uuid)[15]=index_of(d)+1; p->maxBlocksPerMultiProcessor=32; return cudaSuccess;}
X cudaError_t cudaDeviceGetAttribute(int*v,cudaDeviceAttr a,int d){ int A,B; cc(A,B); switch((int)a){case cudaDevAttrComputeCapabilityMajor:*v=A;break;case cudaDevAttrComputeCapabilityMinor:*v=B;break;case cudaDevAttrMultiProcessorCount:*v=132;break;case cudaDevAttrMaxThreadsPerBlock:*v=1024;break;case cudaDevAttrWarpSize:*v=32;break;case cudaDevAttrMaxSharedMemoryPerBlock:*v=49152;break;case cudaDevAttrMaxSharedMemoryPerBlockOptin:*v=232448;break;case cudaDevAttrMaxThreadsPerMultiProcessor:*v=2048;break;case cudaDevAttrMaxGridDimX:*v=2147483647;break;case cudaDevAttrMaxGridDimY:case cudaDevAttrMaxGridDimZ:*v=65535;break;default:*v=0;} return cudaSuccess;}
X cudaError_t cudaDeviceGetPCIBusId(char*s,int n,int d){ snprintf(s,n,"0000:%02x:00.0",index_of(d)+1); return cudaSuccess;}
X cudaError_t cudaDeviceCanAccessPeer(int*c,int,int){*c=1;return cudaSuccess;}
X cudaError_t cudaDeviceEnablePeerAccess(int,unsigned){return cudaSuccess;}
X cudaError_t cudaDeviceGetStreamPriorityRange(int*a,int*b){if(a)*a=0;if(b)*b=-5;return cudaSuccess;}
X cudaError_t cudaDeviceSynchronize(){return cudaSuccess;}
X cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*p,int){*p=(cudaMemPool_t)8;return cudaSuccess;}
X cudaError_t cudaDriverGetVersion(int*v){*v=getenv("FAKE_OLD_DRIVER")?12020:13000;return cudaSuccess;}
X cudaError_t cudaRuntimeGetVersion(int*v){*v=13000;return cudaSuccess;}
X cudaError_t cudaMalloc(void**p,size_t n){ {std::lock_guard<std::mutex> l(m); if(used[dev]+n>total()){*p=0;return fail(cudaErrorMemoryAllocation);}} *p=get(n,1); return *p?cudaSuccess:fail(cudaErrorMemoryAllocation);}
X cudaError_t cudaMallocAsync(void**p,size_t n,cudaStream_t){return cudaMalloc(p,n);}
X cudaError_t cudaFree(void*p){drop(p);return cudaSuccess;}
X cudaError_t cudaFreeAsync(void*p,cudaStream_t){drop(p);return cudaSuccess;}
X cudaError_t cudaHostAlloc(void**p,size_t n,unsigned){*p=get(n,2);return cudaSuccess;}
X cudaError_t cudaFreeHost(void*p){drop(p);return cudaSuccess;}
X cudaError_t cudaHostRegister(void*p,size_t n,unsigned){std::lock_guard<std::mutex> l(m);blocks()[(char*)p]={n,2,dev};return cudaSuccess;}
X cudaError_t cudaHostUnregister(void*p){std::lock_guard<std::mutex> l(m);blocks().erase((char*)p);return cudaSuccess;}
X cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*a,const void*p){ memset(a,0,sizeof*a); std::lock_guard<std::mutex> l(m); Block*b=find(p); if(!b){a->type=cudaMemoryTypeUnregistered;return cudaSuccess;} a->type=b->kind==1?cudaMemoryTypeDevice:cudaMemoryTypeHost; a->device=b->dev; if(b->kind==1)a->devicePointer=(void*)p; else {a->hostPointer=(void*)p;a->devicePointer=(void*)p;} return cudaSuccess;}
X cudaError_t cudaMemGetInfo(size_t*f,size_t*t){ std::lock_guard<std::mutex> l(m); *t=total(); *f=total()-used[dev]; return cudaSuccess;}
X cudaError_t cudaMemcpy(void*d,const void*s,size_t n,cudaMemcpyKind){memmove(d,s,n);return cudaSuccess;}
X cudaError_t cudaMemcpyAsync(void*d,const void*s,size_t n,cudaMemcpyKind,cudaStream_t){memmove(d,s,n);return cudaSuccess;}
X cudaError_t cudaMemcpyPeerAsync(void*d,int,const void*s,int,size_t n,cudaStream_t){memmove(d,s,n);return cudaSuccess;}
X cudaError_t cudaMemcpy2DAsync(void*d,size_t dp,const void*s,size_t sp,size_t w,size_t h,cudaMemcpyKind,cudaStream_t){for(size_t i=0;i<h;i++)memmove((char*)d+i*dp,(const char*)s+i*sp,w);return cudaSuccess;}
X cudaError_t cudaMemset(void*p,int v,size_t n){memset(p,v,n);return cudaSuccess;}
X cudaError_t cudaMemsetAsync(void*p,int v,size_t n,cudaStream_t){memset(p,v,n);return cudaSuccess;}
X cudaError_t cudaMemcpyToSymbol(const void*,const void*,size_t,size_t,cudaMemcpyKind){return cudaSuccess;}
X cudaError_t cudaGetSymbolAddress(void**p,const void*){static char z[1<<20];*p=z;return cudaSuccess;}
X cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t,cudaMemPoolAttr,void*v){*(unsigned long long*)v=0;return cudaSuccess;}
X cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t,cudaMemPoolAttr,void*){return cudaSuccess;}
X cudaError_t cudaMemPoolSetAccess(cudaMemPool_t,const cudaMemAccessDesc*,size_t){return cudaSuccess;}
X cudaError_t cudaMemPoolTrimTo(cudaMemPool_t,size_t){return cudaSuccess;}
struct Ev{double t; bool rec;};
static double now(){timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
X cudaError_t cudaEventCreateWithFlags(cudaEvent_t*e,unsigned){*e=(cudaEvent_t)new Ev{0,false};return cudaSuccess;}
X cudaError_t cudaEventCreate(cudaEvent_t*e){return cudaEventCreateWithFlags(e,0);}
X cudaError_t cudaEventDestroy(cudaEvent_t e){delete (Ev*)e;return cudaSuccess;}
X cudaError_t cudaEventRecord(cudaEvent_t e,cudaStream_t){((Ev*)e)->t=now();((Ev*)e)->rec=true;return cudaSuccess;}
X cudaError_t cudaEventRecordWithFlags(cudaEvent_t e,cudaStream_t s,unsigned){return cudaEventRecord(e,s);}
X cudaError_t cudaEventQuery(cudaEvent_t){return cudaSuccess;}
X cudaError_t cudaEventSynchronize(cudaEvent_t){return cudaSuccess;}
X cudaError_t cudaEventElapsedTime(float*ms,cudaEvent_t a,cudaEvent_t b){ if(!((Ev*)a)->rec||!((Ev*)b)->rec)return fail(cudaErrorInvalidResourceHandle); *ms=1000*(((Ev*)b)->t-((Ev*)a)->t);return cudaSuccess;}
static cudaError_t stream(cudaStream_t*s){static long n=1000; std::lock_guard<std::mutex> l(m); *s=(cudaStream_t)(n+=8);return cudaSuccess;}
X cudaError_t cudaStreamCreate(cudaStream_t*s){return stream(s);}
X cudaError_t cudaStreamCreateWithFlags(cudaStream_t*s,unsigned){return stream(s);}
X cudaError_t cudaStreamCreateWithPriority(cudaStream_t*s,unsigned,int){return stream(s);}
X cudaError_t cudaStreamDestroy(cudaStream_t){return cudaSuccess;}
X cudaError_t cudaStreamGetPriority(cudaStream_t,int*p){*p=0;return cudaSuccess;}
X cudaError_t cudaStreamQuery(cudaStream_t){return cudaSuccess;}
X cudaError_t cudaStreamSynchronize(cudaStream_t){return cudaSuccess;}
X cudaError_t cudaStreamWaitEvent(cudaStream_t,cudaEvent_t,unsigned){return cudaSuccess;}
X cudaError_t cudaStreamIsCapturing(cudaStream_t,cudaStreamCaptureStatus*s){*s=cudaStreamCaptureStatusNone;return cudaSuccess;}
X cudaError_t cudaStreamGetCaptureInfo(cudaStream_t,cudaStreamCaptureStatus*s,unsigned long long*id,cudaGraph_t*,const cudaGraphNode_t**,const cudaGraphEdgeData**,size_t*){*s=cudaStreamCaptureStatusNone;if(id)*id=0;return cudaSuccess;}
X cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*){return cudaSuccess;}
X cudaError_t cudaStreamAddCallback(cudaStream_t s,cudaStreamCallback_t f,void*d,unsigned){f(s,cudaSuccess,d);return cudaSuccess;}
X cudaError_t cudaLaunchHostFunc(cudaStream_t,cudaHostFn_t f,void*d){f(d);return cudaSuccess;}
static long launches=0;
X long fake_launches(){return launches;}
X cudaError_t cudaLaunchKernel(const void*,dim3,dim3,void**,size_t,cudaStream_t){launches++;return cudaSuccess;}
X cudaError_t __cudaLaunchKernel(cudaKernel_t,dim3,dim3,void**,size_t,cudaStream_t){launches++;return cudaSuccess;}
X cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*,const void*,void**){launches++;return cudaSuccess;}
X cudaError_t cudaLaunchCooperativeKernel(const void*,dim3,dim3,void**,size_t,cudaStream_t){launches++;return cudaSuccess;}
X cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*a,const void*){memset(a,0,sizeof*a);a->maxThreadsPerBlock=1024;a->numRegs=32;a->binaryVersion=90;a->ptxVersion=90;a->maxDynamicSharedSizeBytes=232448;return cudaSuccess;}
X cudaError_t cudaFuncSetAttribute(const void*,cudaFuncAttribute,int){return cudaSuccess;}
X cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*n,const void*,int,size_t){*n=2;return cudaSuccess;}
X cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*n,const void*,int,size_t,unsigned){*n=2;return cudaSuccess;}
X cudaError_t cudaGetLastError(){cudaError_t e=last;last=cudaSuccess;return e;}
X cudaError_t cudaPeekAtLastError(){return last;}
X const char* cudaGetErrorString(cudaError_t e){return e==2?"out of memory":e==101?"invalid device ordinal":e==100?"no CUDA-capable device is detected":e==35?"CUDA driver version is insufficient for CUDA runtime version":e==0?"no error":"fake error";}
X const char* cudaGetErrorName(cudaError_t e){return e==2?"cudaErrorMemoryAllocation":"cudaErrorFake";}
X cudaError_t cudaProfilerStart(){return cudaSuccess;}
X cudaError_t cudaProfilerStop(){return cudaSuccess;}
static CUresult generic(){return CUDA_SUCCESS;}
static CUresult ctxstate(CUdevice,unsigned*f,int*a){if(f)*f=0;if(a)*a=1;return CUDA_SUCCESS;}
static CUresult errstr(CUresult,const char**s){*s="fake driver error";return CUDA_SUCCESS;}
static CUresult drvver(int*v){*v=13000;return CUDA_SUCCESS;}
X cudaError_t cudaGetDriverEntryPointByVersion(const char*n,void**f,unsigned,unsigned long long,cudaDriverEntryPointQueryResult*r){ std::string s(n); *f= s=="cuDevicePrimaryCtxGetState"?(void*)ctxstate: s=="cuGetErrorString"?(void*)errstr: s=="cuDriverGetVersion"?(void*)drvver:(void*)generic; if(r)*r=cudaDriverEntryPointSuccess; return cudaSuccess;}
X void** __cudaRegisterFatBinary(void*){static void*p[4];return p;}
X void __cudaRegisterFatBinaryEnd(void**){}
X void __cudaUnregisterFatBinary(void**){}
X void __cudaRegisterFunction(void**,const char*,char*,const char*,int,uint3*,uint3*,dim3*,dim3*,int*){}
X void __cudaRegisterVar(void**,char*,char*,const char*,int,size_t,int,int){}
X char __cudaInitModule(void**){return 1;}
X unsigned __cudaPushCallConfiguration(dim3,dim3,size_t,void*){return 0;}
X cudaError_t __cudaPopCallConfiguration(dim3*g,dim3*b,size_t*s,void*st){ if(s)*s=0; *(void**)st=0; return cudaSuccess;}
X cudaError_t __cudaGetKernel(cudaKernel_t*k,const void*f){*k=(cudaKernel_t)f;return cudaSuccess;}
X cudaError_t cudaIpcCloseMemHandle(void*){return cudaErrorNotSupported;}
