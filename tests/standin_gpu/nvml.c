#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <time.h>
#define X __attribute__((visibility("default")))
static int n(){const char*v=getenv("FAKE_GPUS");return v?atoi(v):1;}
static double t0;static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
static int no(const char*w){const char*v=getenv("FAKE_NVML_MISSING");return v&&strstr(v,w);}
X int nvmlInit(){return getenv("FAKE_NO_NVML")?9:0;} X int nvmlInit_v2(){return getenv("FAKE_NO_NVML")?9:0;} X int nvmlInitWithFlags(){return getenv("FAKE_NO_NVML")?9:0;} X int nvmlShutdown(){return 0;}
X int nvmlDeviceGetCount_v2(unsigned*c){*c=n();return 0;}
X int nvmlDeviceGetHandleByIndex_v2(unsigned i,void**h){if(i>=n())return 2;*h=(void*)(long)(i+1);return 0;}
X int nvmlDeviceGetHandleByUUID(const char*u,void**h){if(strncmp(u,"GPU-",4))return 6;unsigned i=strtoul(u+strlen(u)-2,0,16);if(!i||i>n())return 6;*h=(void*)(long)i;return 0;}
X int nvmlDeviceGetUUID(void*h,char*u,unsigned l){snprintf(u,l,"GPU-00000000-0000-0000-0000-%012lx",(long)h);return 0;}
X int nvmlDeviceGetUtilizationRates(void*h,unsigned*u){if(no("util"))return 3;u[0]=50;u[1]=20;return 0;}
X int nvmlDeviceGetMemoryInfo(void*h,unsigned long long*m){m[0]=8ull<<30;m[1]=6ull<<30;m[2]=2ull<<30;return 0;}
X int nvmlDeviceGetPowerUsage(void*h,unsigned*p){if(no("power"))return 3;*p=100000;return 0;}
X int nvmlDeviceGetTemperature(void*h,int k,unsigned*t){*t=50;return 0;}
X int nvmlDeviceGetTemperatureV(void*h,void*t){((int*)t)[2]=50;return 0;}
X int nvmlDeviceGetClockInfo(void*h,int k,unsigned*t){*t=1500;return 0;}
X int nvmlDeviceGetTotalEnergyConsumption(void*h,unsigned long long*e){if(no("energy"))return 3;*e=(unsigned long long)(now()*100000);return 0;}
X int nvmlDeviceGetCurrentClocksThrottleReasons(void*h,unsigned long long*e){*e=4;return 0;}
X int nvmlDeviceGetCurrentClocksEventReasons(void*h,unsigned long long*e){*e=4;return 0;}
X int nvmlDeviceGetComputeRunningProcesses_v3(void*h,unsigned*c,void*p){if(no("processes"))return 3;*c=0;return 0;}
X int nvmlDeviceGetComputeRunningProcesses_v2(void*h,unsigned*c,void*p){*c=0;return 0;}
X int nvmlSystemGetDriverVersion(char*v,unsigned l){strncpy(v,getenv("FAKE_OLD_DRIVER")?"535.104.05":"580.95.05",l);return 0;}
X const char* nvmlErrorString(int e){return e==3?"Not Supported":e==6?"Not Found":"fake";}
X int nvmlDeviceGetHandleByPciBusId_v2(const char*b,void**h){*h=(void*)1;return 0;} X int nvmlDeviceGetNvLinkRemoteDeviceType(){return 3;} X int nvmlDeviceGetNvLinkRemotePciInfo_v2(){return 3;} X int nvmlDeviceGetComputeRunningProcesses(void*h,unsigned*c,void*p){*c=0;return 0;} X int nvmlSystemGetCudaDriverVersion(int*v){*v=getenv("FAKE_OLD_DRIVER")?12020:13000;return 0;} X int nvmlSystemGetCudaDriverVersion_v2(int*v){*v=getenv("FAKE_OLD_DRIVER")?12020:13000;return 0;} X int nvmlDeviceGetGpuFabricInfoV(){return 3;}
X int nvmlDeviceGetCudaComputeCapability(void*h,int*a,int*b){const char*v=getenv("FAKE_CC");*a=9;*b=0;if(v)sscanf(v,"%d.%d",a,b);return 0;}
X int nvmlDeviceGetName(void*h,char*s,unsigned l){const char*v=getenv("FAKE_GPU_NAME");strncpy(s,v?v:"NVIDIA H200",l);return 0;}
X int nvmlSystemGetNVMLVersion(char*v,unsigned l){strncpy(v,"13.580",l);return 0;}
